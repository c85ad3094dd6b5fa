"""The page that compares FP4 methods: its Gaussian figures, and the methods that it has."""

from pathlib import Path

import fp4 as fp4_page
import pytest
from render import table

from megatron_lowbit.numerics import FORMATS

PAGE = Path(__file__).parents[2] / "docs" / "research" / "fp4.md"
METHODS = {one.name: one for one in (*fp4_page.NEAREST, *fp4_page.STOCHASTIC)}


@pytest.mark.parametrize("name", ["NVFP4", "NVFP4, 16x16", "NVFP4, 16/17, SR"])
def test_the_page_s_figures_are_the_script_s(name):
    row = table((), [fp4_page.error_of_gaussian(METHODS[name])]).splitlines()[-1]
    assert row in PAGE.read_text().splitlines()


def test_every_fp4_format_is_compared():
    four_bits = {name for name, f in FORMATS.items() if f.element.bits == 4 and name[:3] != "int"}
    compared = {one.quantizer.format.name for one in METHODS.values()}
    assert four_bits - compared == {"mxfp4-2d", "nvfp4-ue5m3-2d"}
