"""The functions of ``numerics``, fused, and the table that chooses among them."""
