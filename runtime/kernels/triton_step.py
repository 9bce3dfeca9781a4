# SPDX-License-Identifier: Apache-2.0
"""Device function that applies an optimizer step to a tile of rows, from summed gradients to stored weights."""

import triton
import triton.language as tl

from sennit.runtime.kernels.triton_rows import element_pointers, lane_tree, store_rows, table_field
from sennit.runtime.kernels.triton_tables import STATE0, STATE1

# Bits of CLIPPED.
CLIP_VALUE = 1
CLIP_NORM = 2

_CLIP_VALUE = tl.constexpr(CLIP_VALUE)
_CLIP_NORM = tl.constexpr(CLIP_NORM)
_STATE0 = tl.constexpr(STATE0)
_STATE1 = tl.constexpr(STATE1)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _mean_square(g, dim, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    return tl.div_rn(lane_tree(g * g, ROWS, WIDTH), dim.to(tl.float32))


@triton.jit
def _whole(scalar, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS] to [ROWS, WIDTH]: exact divisions need equal shapes."""
    return tl.broadcast_to(scalar[:, None], [ROWS, WIDTH])


@triton.jit
def step_rows(
    g,
    w,
    live,
    table,
    row,
    tables,
    address,
    precision,
    dim,
    bad,
    constants,
    step,
    seed_low,
    seed_high,
    KIND: tl.constexpr,
    CLIPPED: tl.constexpr,
    DECAY: tl.constexpr,
    DECAY_AFTER: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISIONS: tl.constexpr,
    ALIGN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Rules 7 and 8 of docs/reference/embedding.md for the rows [ROWS] that are `live`. `g` is +0 beyond a row's end.

    `w` are the rows' weights; `address`, `precision` and `dim` are those of their tables. `constants` are those of
    `optimizers.StepConstants` in the order of `triton_operator`. `bad` int64 [tables, 2] counts skipped rows and keeps
    the lowest. Both are integers, so the order of the programs does not matter.
    """
    rate, scale1, scale2, epsilon, beta1, beta1_rest, beta2, beta2_rest, decay, keep, max_gradient, max_norm, l1 = (
        constants
    )
    columns = tl.arange(0, WIDTH)[None, :]
    inside = columns < dim[:, None]

    not_finite = (g.to(tl.int32, bitcast=True) & _INFINITY) == _INFINITY
    is_bad = live & (tl.max(not_finite.to(tl.int32), axis=1) > 0)
    tl.atomic_add(bad + table * 2, tl.full([ROWS], 1, tl.int64), mask=is_bad)
    tl.atomic_min(bad + table * 2 + 1, row, mask=is_bad)
    live = live & (is_bad == 0)
    mask = inside & live[:, None]

    if _CLIP_VALUE & CLIPPED:
        g = tl.minimum(tl.maximum(g, -max_gradient), max_gradient)
    if _CLIP_NORM & CLIPPED:
        norm = tl.sqrt_rn(lane_tree(g * g, ROWS, WIDTH))
        is_long = norm > max_norm
        most = tl.zeros([ROWS], tl.float32) + max_norm
        g = tl.where(is_long, tl.div_rn(most, tl.where(is_long, norm, 1.0)), 1.0)[:, None] * g
    if DECAY:
        g = g + decay * w
    if KEEP:
        w = w * keep

    if KIND == "sgd":
        w = w - rate * g
    elif (KIND == "momentum") or (KIND == "nesterov"):
        at = element_pointers(table_field(tables, table, _STATE0), row, dim, columns, tl.float32, ALIGN)
        b = beta1 * tl.load(at, mask=mask, other=0.0) + g
        tl.store(at, b, mask=mask)
        if KIND == "nesterov":
            b = g + beta1 * b
        w = w - rate * b
    elif KIND == "adagrad":
        at = element_pointers(table_field(tables, table, _STATE0), row, dim, columns, tl.float32, ALIGN)
        total = tl.load(at, mask=mask, other=0.0) + g * g
        tl.store(at, total, mask=mask)
        w = w - tl.div_rn(rate * g, tl.sqrt_rn(total) + epsilon)
    elif KIND == "row_wise_adagrad":
        at = table_field(tables, table, _STATE0).to(tl.pointer_type(tl.float32)) + row
        total = tl.load(at, mask=live, other=0.0) + _mean_square(g, dim, ROWS, WIDTH)
        tl.store(at, total, mask=live)
        w = w - tl.div_rn(tl.zeros([ROWS], tl.float32) + rate, tl.sqrt_rn(total) + epsilon)[:, None] * g
    elif KIND == "ftrl":
        at = element_pointers(table_field(tables, table, _STATE0), row, dim, columns, tl.float32, ALIGN)
        of_n = element_pointers(table_field(tables, table, _STATE1), row, dim, columns, tl.float32, ALIGN)
        before = tl.load(of_n, mask=mask, other=0.0)
        n = before + g * g
        tl.store(of_n, n, mask=mask)
        low = 0.0 - l1
        first = 0.0 - (epsilon * w + tl.where(w > 0, l1, tl.where(w < 0, low, 0.0)))
        start = tl.where(before == 0, first, tl.load(at, mask=mask, other=0.0))
        root = tl.sqrt_rn(n)
        z = (start + rate * g) - (root - tl.sqrt_rn(before)) * w
        tl.store(at, z, mask=mask)
        within = tl.where(z > l1, l1, tl.where(z < low, low, z))
        w = tl.div_rn(within - z, root + epsilon)
    else:
        at = element_pointers(table_field(tables, table, _STATE0), row, dim, columns, tl.float32, ALIGN)
        m = beta1 * tl.load(at, mask=mask, other=0.0) + beta1_rest * g
        tl.store(at, m, mask=mask)
        if KIND == "partial_row_wise_adam":
            of_row = table_field(tables, table, _STATE1).to(tl.pointer_type(tl.float32)) + row
            v = beta2 * tl.load(of_row, mask=live, other=0.0) + beta2_rest * _mean_square(g, dim, ROWS, WIDTH)
            tl.store(of_row, v, mask=live)
            a = tl.zeros([ROWS], tl.float32) + scale1
            w = w - tl.div_rn(a, tl.sqrt_rn(v) * scale2 + epsilon)[:, None] * m
        else:
            of_element = element_pointers(table_field(tables, table, _STATE1), row, dim, columns, tl.float32, ALIGN)
            v = beta2 * tl.load(of_element, mask=mask, other=0.0) + beta2_rest * (g * g)
            tl.store(of_element, v, mask=mask)
            # 1 beyond the last column, so that an epsilon of 0 does not add 0 / 0.
            root = tl.where(mask, tl.sqrt_rn(v) * scale2 + epsilon, 1.0)
            u = tl.div_rn(scale1 * m, root)
            if KIND == "adam":
                w = w - u
            else:
                tl.static_assert(KIND == "lamb")
                if DECAY_AFTER:
                    u = u + decay * w
                of_w = tl.sqrt_rn(lane_tree(tl.where(mask, w * w, 0.0), ROWS, WIDTH))
                of_u = tl.sqrt_rn(lane_tree(tl.where(mask, u * u, 0.0), ROWS, WIDTH))
                both = (of_w > 0) & (of_u > 0)
                trust = tl.where(both, tl.div_rn(of_w, tl.where(both, of_u, 1.0)), 1.0)
                w = w - (rate * trust)[:, None] * u
    store_rows(
        tables,
        table,
        address,
        precision,
        row,
        dim,
        columns,
        mask,
        w,
        step,
        seed_low,
        seed_high,
        ROWS,
        WIDTH,
        PRECISIONS,
        ALIGN,
        STOCHASTIC,
    )
