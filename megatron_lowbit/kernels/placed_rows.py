"""Rows that were quantized as one matrix, as operands of the parts that they belong to."""

import torch

from megatron_lowbit.kernels.operand_group import OperandGroup, group_layout
from megatron_lowbit.kernels.routes import Form
from megatron_lowbit.kernels.sections import uploaded
from megatron_lowbit.kernels.split import Rows
from megatron_lowbit.numerics import QuantizedTensor, Request


def place_rows(codes: QuantizedTensor, rows: Rows, request: Request) -> OperandGroup:
    """Copy codes to where :func:`quantize_sections` would write the codes of parts of the rows.

    Args:
        codes: (T, K), whose scales lie within a row.
        rows: numbers of rows of the parts, of sum T.
        request: of the parts, for codes.
    """
    layout = group_layout(request.keyless, Form.CODES, codes.shape[1], False)
    group = layout.allocate(rows, codes.tensor_scale.expand(len(rows)).contiguous())
    device, (total, blocks) = codes.codes.device, codes.scales.shape
    # Numbers of rows, and rows and units before, of each part and then of each row.
    table = torch.empty(3, len(rows), dtype=torch.int64, pin_memory=device.type == "cuda")
    table.numpy()[:] = [rows.on_host, *(rows.in_units(unit).before for unit in (1, layout.unit))]
    of_parts = uploaded(table, device)
    counts, before, units = of_parts.repeat_interleave(of_parts[0], 1, output_size=total)
    number, block = (torch.arange(size, device=device) for size in (total, blocks))
    number -= before
    row = units * layout.unit + number
    found, placed = codes.codes.view(torch.uint8), group.codes.view(torch.uint8)
    placed.view(-1, found.shape[1])[row] = found
    index = row[:, None] * blocks + block
    if layout.operand.rows_fastest:
        first = units * layout.operand.scales.numel + number
        index = first[:, None] + counts[:, None] * block
    group.scales[index] = codes.scales
    return group
