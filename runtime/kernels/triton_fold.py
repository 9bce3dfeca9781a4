# SPDX-License-Identifier: Apache-2.0
"""The kernel that folds products of matrices (docs/reference/embedding.md, rule 9)."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["item_count"],
    do_not_specialize_on_alignment=["left_numbers", "right_numbers", "starts"],
)
def fold_products_kernel(
    result,
    left,
    left_numbers,
    right,
    right_numbers,
    starts,
    item_count,
    row_count,
    depth,
    column_count,
    left_stride,
    left_row_stride,
    left_column_stride,
    right_stride,
    right_row_stride,
    SINGLE: tl.constexpr,
    ITEMS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A program sums WIDTH elements of each of ITEMS items. A thread adds in order, as the reference does."""
    item = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    number = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = item < item_count
    inside = number < row_count * column_count
    row = number // column_count
    column = number % column_count
    if SINGLE:
        first = item
        count = tl.where(live, 1, 0).to(tl.int64)
    else:
        first = tl.load(starts + item, mask=live, other=0)
        count = tl.load(starts + item + 1, mask=live, other=0) - first
    x = tl.zeros([ITEMS, WIDTH], tl.float32)
    for place in tl.range(0, tl.max(count, axis=0)):
        here = place < count
        mask = here[:, None] & inside[None, :]
        of_left = left + tl.load(left_numbers + first + place, mask=here, other=0) * left_stride
        of_right = right + tl.load(right_numbers + first + place, mask=here, other=0) * right_stride
        a = of_left[:, None] + (row * left_row_stride)[None, :]
        b = of_right[:, None] + column[None, :]
        for k in tl.range(0, depth):
            of_a = tl.load(a + k * left_column_stride, mask=mask, other=0.0)
            of_b = tl.load(b + k * right_row_stride, mask=mask, other=0.0)
            x = x + of_a * of_b
    to = result + item[:, None] * (row_count * column_count) + number[None, :]
    tl.store(to, x, mask=live[:, None] & inside[None, :])
