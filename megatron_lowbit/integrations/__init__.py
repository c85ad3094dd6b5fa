"""Recipes in other training frameworks: one file each, which nothing else imports."""
