"""Matrix products with MXFP8 and MXFP4 weights (OCP MX v1.0), read from HBM as packed as they are stored.

Trn3 multiplies packed operands (`nc_matmul_mx`); its activations are quantised to MXFP8 on the Vector engine unless
they are MX already. Trn2 has no such product: tiles are dequantised to bfloat16 in SBUF, with the same HBM traffic.

Packed: k = 4 * row + element, element 0 in the low bits, so that a row holds 4 neighbours and 8 rows share a scale.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import nki
import nki.isa as nisa
import nki.language as nl

from inferlib.nki_kernels.call import call

ELEMENTS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
GROUP = 32
# K of one product: 128 partitions of 4.
TILE_K = 512
# Tiles of K that are loaded at once, and tokens that share one reading of the weights.
LOADED_TILES, TOKENS = 8, 256
# A nibble becomes an e4m3, smaller by this power of two, when its sign moves up 4 bits and its other bits 2.
NIBBLE_SHIFT = 6.0
SIGNS, MAGNITUDES = 0x08080808, 0x07070707


def mx_matmul(
    x: jax.Array,
    w: jax.Array,
    scales: jax.Array,
    *,
    element: str,
    x_scales: jax.Array | None = None,
    x_element: str | None = None,
    lnc: int | None = None,
) -> jax.Array:
    """x [M, K] bfloat16 times w -> [M, N] bfloat16, accumulated in float32; K a multiple of 32.

    w [K / 4, N]: four elements in uint32 (float8) or uint16 (float4), `element` one of ELEMENTS; scales [K / 32, N]
    uint8, a factor of 2**(s - 127). For trn2 float8_e4m3fn weights are stored by `mx_pack.for_trn2`. x_scales,
    x_element: x is in MX too, [K / 4, M] packed, scales [K / 32, M]. lnc: physical cores.
    """
    if element not in ELEMENTS or (x_scales is not None and x_element not in ELEMENTS):
        raise ValueError(f"elements {element!r} and {x_element!r}: MX has {', '.join(ELEMENTS)}")
    if (x_scales is None) != (x_element is None):
        raise ValueError("x in MX needs both x_scales and x_element")
    k, n = 4 * w.shape[0], w.shape[1]
    m = x.shape[0] if x_scales is None else x.shape[1]
    if k % GROUP or scales.shape != (k // GROUP, n) or scales.dtype != jnp.uint8:
        raise ValueError(f"w {w.shape} of K {k} needs uint8 scales [K / 32, {n}], K a multiple of 32: {scales.shape}")
    _check_packed("w", w, element)
    result = (jax.ShapeDtypeStruct((m, n), jnp.bfloat16),)
    if x_scales is None or x_element is None:
        if x.shape != (m, k) or x.dtype != jnp.bfloat16:
            raise ValueError(f"x {x.shape} {x.dtype} must be bfloat16 [M, {k}]")
        return call("mx_matmul", kernel, lnc, result, x, w, scales, element=element)[0]
    _check_packed("x", x, x_element)
    if x.shape[0] != w.shape[0] or x_scales.shape != (k // GROUP, m) or x_scales.dtype != jnp.uint8:
        raise ValueError(f"x {x.shape} and its scales {x_scales.shape} do not match w {w.shape}")
    return call("mx_matmul", kernel_mx, lnc, result, x, x_scales, w, scales, x_element=x_element, element=element)[0]


def _check_packed(name: str, packed: jax.Array, element: str) -> None:
    want = jnp.uint16 if element == "float4_e2m1fn" else jnp.uint32
    if packed.dtype != want:
        raise ValueError(f"{name} of four {element} is stored in {jnp.dtype(want)}, not {packed.dtype}")


@nki.jit
def kernel(x, w, scales, element):
    """x [M, K] bfloat16, w [K / 4, N], scales [K / 32, N] -> (y [M, N] bfloat16,)."""
    tokens, features = x.shape[0], w.shape[1]
    y = nl.ndarray((tokens, features), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    for first in range(0, tokens, TOKENS):
        operands = []
        for start in range(first, min(first + TOKENS, tokens), 128):
            operand = turn_activations(x, start, min(128, tokens - start))
            if nisa.get_nc_version() == nisa.nc_version.gen4:
                operand = quantise(operand)
            operands.append(operand)
        multiply(y, first, operands, w, scales, element, nl.float8_e4m3fn_x4)
    return (y,)


@nki.jit
def kernel_mx(x, x_scales, w, scales, x_element, element):
    """x [K / 4, M] packed, x_scales [K / 32, M], w [K / 4, N], scales [K / 32, N] -> (y [M, N] bfloat16,)."""
    tokens, features = x.shape[1], w.shape[1]
    y = nl.ndarray((tokens, features), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    for first in range(0, tokens, TOKENS):
        operands = []
        for start in range(first, min(first + TOKENS, tokens), 128):
            operands.append(take_activations(x, x_scales, start, min(128, tokens - start), x_element))
        multiply(y, first, operands, w, scales, element, packed_dtype(x_element))
    return (y,)


def packed_dtype(element):
    if element == "float4_e2m1fn":
        return nl.float4_e2m1fn_x4
    if element == "float8_e5m2":
        return nl.float8_e5m2_x4
    return nl.float8_e4m3fn_x4


def whole_quadrants(lanes):
    """MX operands have a multiple of 32 partitions, at most 128."""
    return min(128, (lanes + 31) // 32 * 32)


def turn_activations(x, start, tokens):
    """([128, K tiles, M, 4] bfloat16,) in SBUF: lane p of tile t holds k = 512 t + 4 p + element; zeros beyond K.

    On trn2 [128, K tiles, 4, M]: each element is a stationary operand of its own.
    """
    size = x.shape[1]
    tiles = (size + TILE_K - 1) // TILE_K
    quad = nisa.get_nc_version() == nisa.nc_version.gen4
    even = tokens + tokens % 2
    natural = nl.ndarray((tokens, size), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=natural, src=x[start : start + tokens, :])
    if quad:
        turned = nl.ndarray((128, tiles, even, 4), dtype=x.dtype, buffer=nl.sbuf)
        if size % TILE_K > 0:
            nisa.memset(dst=turned[:, tiles - 1, :, :], value=0.0)
        if even > tokens:
            nisa.memset(dst=turned[:, :, tokens:even, :], value=0.0)
    else:
        turned = nl.ndarray((128, tiles, 4, tokens), dtype=x.dtype, buffer=nl.sbuf)
    for tile in range(tiles):
        lanes = min(128, (size - tile * TILE_K) // 4)
        moved = nl.ndarray((lanes, 4, tokens), dtype=x.dtype, buffer=nl.psum)
        for element in range(4):
            first = tile * TILE_K + element
            source = natural[:, first : first + 4 * (lanes - 1) + 1 : 4]
            nisa.nc_transpose(dst=moved[:, element, :], data=source, engine=nisa.engine.tensor)
        if quad:
            nisa.tensor_copy(dst=turned[0:lanes, tile, 0:tokens, :], src=moved.permute((0, 2, 1)))
        else:
            nisa.tensor_copy(dst=turned[0:lanes, tile, :, :], src=moved)
    return (turned,)


def take_activations(x, x_scales, start, tokens, element):
    """Load activations that are MX already: as `quantise` returns them, or on trn2 as `turn_activations` does."""
    rows = x.shape[0]
    tiles = (rows + 127) // 128
    even = tokens + tokens % 2
    if nisa.get_nc_version() == nisa.nc_version.gen4:
        return load_packed(x, x_scales, 0, tiles, start, tokens, even, element)
    turned = nl.ndarray((128, tiles, 4, even), dtype=nl.bfloat16, buffer=nl.sbuf)
    spread = group_rows()
    for first in range(0, tiles, LOADED_TILES):
        here = min(LOADED_TILES, tiles - first)
        loaded = load_packed(x, x_scales, first, here, start, tokens, even, element)
        for tile in range(here):
            lanes = rows - (first + tile) * 128
            dequantise(turned[:, first + tile, :, :], loaded, tile, lanes, element, spread)
    return (turned,)


def quantise(operand):
    """([128, K tiles, M] packed MXFP8, scales of the same shape)."""
    turned = operand[0]
    tiles, tokens = turned.shape[1], turned.shape[2]
    data = nl.ndarray((128, tiles, tokens), dtype=nl.float8_e4m3fn_x4, buffer=nl.sbuf)
    scale = nl.ndarray((128, tiles, tokens), dtype=nl.uint8, buffer=nl.sbuf)
    written = turned.flatten_dims(2, 3)
    for tile in range(tiles):
        nisa.quantize_mx(dst=data[:, tile, :], src=written[:, tile, :], dst_scale=scale[:, tile, :])
    return data, scale


def load_packed(packed, scales, first, tiles, start, columns, width, element):
    """(data [128, tiles, width], scales): K tiles from `first` and columns from `start`, zeros beyond either.

    Scales are laid out as nc_matmul_mx wants them; on trn2 as `load_exponents` returns them, at most LOADED_TILES at
    once.
    """
    rows = min(tiles * 128, packed.shape[0] - first * 128)
    whole = rows // 128
    top = first * 128
    data = nl.ndarray((128, tiles, width), dtype=packed.dtype, buffer=nl.sbuf)
    if width > columns:
        nisa.memset(dst=data[:, :, columns:width], value=0)
    if whole > 0:
        source = packed[top : top + whole * 128, start : start + columns].reshape_dim(0, (whole, 128))
        nisa.dma_copy(dst=data[:, 0:whole, 0:columns], src=source.permute((1, 0, 2)))
    if rows % 128 > 0:
        bottom = top + whole * 128
        nisa.memset(dst=data[:, whole, :], value=0)
        nisa.dma_copy(
            dst=data[0 : rows % 128, whole, 0:columns],
            src=packed[bottom : bottom + rows % 128, start : start + columns],
        )
    if nisa.get_nc_version() == nisa.nc_version.gen4:
        return data, load_scales(scales, first, rows, tiles, start, columns, width)
    return data, load_exponents(scales, first, rows, start, columns, width, element)


def load_scales(scales, first, rows, tiles, start, columns, width):
    """[128, tiles, width] uint8: a tile's sixteen rows, four at the start of each quadrant."""
    whole = rows // 128
    scale = nl.ndarray((128, tiles, width), dtype=nl.uint8, buffer=nl.sbuf)
    if width > columns:
        nisa.memset(dst=scale[:, :, columns:width], value=0)
    if whole > 0:
        top = first * 16
        above = scales[top : top + whole * 16, start : start + columns].reshape_dim(0, (whole, 16))
        for quadrant in range(4):
            nisa.dma_copy(
                dst=scale[32 * quadrant : 32 * quadrant + 4, 0:whole, 0:columns],
                src=above[:, 4 * quadrant : 4 * quadrant + 4, :].permute((1, 0, 2)),
            )
    if rows % 128 > 0:
        nisa.memset(dst=scale[:, whole, :], value=0)
        for group in range(0, rows % 128 // 8, 4):
            here = min(4, rows % 128 // 8 - group)
            top = (first + whole) * 16 + group
            nisa.dma_copy(
                dst=scale[8 * group : 8 * group + here, whole, 0:columns],
                src=scales[top : top + here, start : start + columns],
            )
    return scale


def load_exponents(scales, first, rows, start, columns, width, element):
    """[rows / 8, width] bfloat16: the factors of up to 8 tiles, sixteen rows each. A scale is an exponent's bits."""
    groups = rows // 8
    scale = nl.ndarray((groups, width), dtype=nl.uint8, buffer=nl.sbuf)
    if width > columns:
        nisa.memset(dst=scale[:, columns:width], value=0)
    nisa.dma_copy(dst=scale[:, 0:columns], src=scales[first * 16 : first * 16 + groups, start : start + columns])
    shift = 0.0
    if element == "float4_e2m1fn":
        shift = NIBBLE_SHIFT
    exponents = nl.ndarray((groups, width), dtype=nl.uint16, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=exponents, data=scale, op0=nl.add, operand0=shift)
    nisa.tensor_scalar(dst=exponents, data=exponents, op0=nl.left_shift, operand0=7)
    return exponents.view(nl.bfloat16)


def multiply(y, first, operands, w, scales, element, kind):
    """y[first:] = operands, tiles of up to 128 tokens, times w: strips of columns, each core every other."""
    rows, features = w.shape
    quad = nisa.get_nc_version() == nisa.nc_version.gen4
    strip = 512
    if quad and element == "float4_e2m1fn":
        strip = 1024
    spread = ()
    if not quad:
        spread = group_rows()
    tiles = (rows + 127) // 128
    turn = 0
    for start in range(0, features, strip):
        columns = min(strip, features - start)
        if turn % nl.num_programs() == nl.program_id(0):
            sums = []
            for _ in range(len(operands) * ((columns + 511) // 512)):
                sums.append(nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum))
            for tile in range(0, tiles, LOADED_TILES):
                loaded = min(LOADED_TILES, tiles - tile)
                weights = load_packed(w, scales, tile, loaded, start, columns, columns + columns % 2, element)
                if quad:
                    add_products_mx(sums, operands, weights, tile, rows, columns, element, kind)
                else:
                    add_products(sums, operands, weights, tile, rows, columns, element, spread)
            store(y, first, start, columns, sums, len(operands))
        turn = turn + 1


def add_products_mx(sums, operands, weights, first, rows, columns, element, kind):
    """Add the products of the loaded K tiles, which start at tile `first`, by `nc_matmul_mx`. rows: of all tiles."""
    data, scale = weights
    for i in range(data.shape[1]):
        tile = first + i
        lanes = whole_quadrants(min(128, rows - tile * 128))
        packed = data.view(packed_dtype(element))
        for m in range(len(operands)):
            operand, operand_scale = operands[m]
            stationary = operand
            if operand.dtype != kind:
                stationary = operand.view(kind)
            for at in range(0, columns, 512):
                here = min(512, columns - at)
                nisa.nc_matmul_mx(
                    dst=sums[at // 512 * len(operands) + m][0 : operand.shape[2], 0:here],
                    stationary=stationary[0:lanes, tile, :],
                    moving=packed[0:lanes, i, at : at + here],
                    stationary_scale=operand_scale[0:lanes, tile, :],
                    moving_scale=scale[0:lanes, i, at : at + here],
                    accumulate=tile > 0,
                )


def add_products(sums, operands, weights, first, rows, columns, element, spread):
    """As `add_products_mx`, for trn2: weights are dequantised to bfloat16."""
    for i in range(weights[0].shape[1]):
        tile = first + i
        lanes = min(128, rows - tile * 128)
        values = nl.ndarray((128, 4, columns + columns % 2), dtype=nl.bfloat16, buffer=nl.sbuf)
        dequantise(values, weights, i, lanes, element, spread)
        for m in range(len(operands)):
            turned = operands[m][0]
            for k in range(4):
                nisa.nc_matmul(
                    dst=sums[m][0 : turned.shape[3], 0:columns],
                    stationary=turned[0:lanes, tile, k, :],
                    moving=values[0:lanes, k, 0:columns],
                    accumulate=tile + k > 0,
                )


def group_rows():
    """[128, LOADED_TILES, 128] bfloat16: one where row r scales lane p of tile i, r = 16 i + p // 8, else zero.

    A product with it repeats a tile's rows 8 times.
    """
    shape = (128, LOADED_TILES, 128)
    made = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(dst=made, value=1.0)
    nisa.affine_select(
        dst=made,
        pattern=[[128, LOADED_TILES], [1, 128]],
        channel_multiplier=-8,
        on_true_tile=made,
        on_false_value=0.0,
        cmp_op=nl.greater_equal,
        offset=0,
    )
    nisa.affine_select(
        dst=made,
        pattern=[[-128, LOADED_TILES], [-1, 128]],
        channel_multiplier=8,
        on_true_tile=made,
        on_false_value=0.0,
        cmp_op=nl.greater_equal,
        offset=7,
    )
    return made


def dequantise(values, weights, tile, lanes, element, spread):
    """values [128, 4, even columns] bfloat16: K tile `tile` of loaded weights, its first `lanes` lanes, for trn2."""
    data, exponents = weights
    lanes = min(128, lanes)
    groups, columns = exponents.shape
    repeated = nl.ndarray((lanes, columns), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=repeated, stationary=spread[0:groups, tile, 0:lanes], moving=exponents, accumulate=False)
    factors = nl.ndarray((lanes, columns), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_copy(dst=factors, src=repeated, engine=nisa.engine.scalar)
    codes = data[0:lanes, tile, :]
    if element == "float4_e2m1fn":
        even, odd = unpack_nibbles(codes)
        scale_elements(values[0:lanes, 0:4:2, :], even, factors, nl.float8_e4m3)
        scale_elements(values[0:lanes, 1:4:2, :], odd, factors, nl.float8_e4m3)
    elif element == "float8_e5m2":
        scale_elements(values[0:lanes], codes, factors, nl.float8_e5m2)
    else:
        scale_elements(values[0:lanes], codes, factors, nl.float8_e4m3)


def unpack_nibbles(codes):
    """Nibbles 0 and 2, and 1 and 3, of [lanes, even columns] uint16 as two bytes of e4m3, two columns at a time."""
    even = codes.view(nl.uint32)
    odd = nl.ndarray(even.shape, dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=odd, data=even, op0=nl.right_shift, operand0=4)
    made = []
    for nibbles in (even, odd):
        sign = nl.ndarray(even.shape, dtype=nl.uint32, buffer=nl.sbuf)
        rest = nl.ndarray(even.shape, dtype=nl.uint32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=sign, data=nibbles, op0=nl.bitwise_and, operand0=SIGNS, op1=nl.left_shift, operand1=4)
        nisa.tensor_scalar(
            dst=rest, data=nibbles, op0=nl.bitwise_and, operand0=MAGNITUDES, op1=nl.left_shift, operand1=2
        )
        nisa.tensor_tensor(dst=rest, data1=rest, data2=sign, op=nl.bitwise_or, engine=nisa.engine.vector)
        made.append(rest.view(nl.uint16))
    return made[0], made[1]


def scale_elements(values, packed, factors, kind):
    """values [lanes, e, columns] = the e float8 elements of packed [lanes, columns] times factors [lanes, columns].

    This bounds trn2: the Vector engine and GpSimd each take half of the columns.
    """
    elements, columns = values.shape[1], values.shape[2]
    split = packed.view(kind).reshape_dim(1, (columns, elements)).permute((0, 2, 1))
    spread = factors.expand_dim(1).broadcast(1, elements)
    half = (columns + 1) // 2
    nisa.tensor_tensor(
        dst=values[:, :, 0:half],
        data1=split[:, :, 0:half],
        data2=spread[:, :, 0:half],
        op=nl.multiply,
        engine=nisa.engine.vector,
    )
    if half < columns:
        nisa.tensor_tensor(
            dst=values[:, :, half:columns],
            data1=split[:, :, half:columns],
            data2=spread[:, :, half:columns],
            op=nl.multiply,
            engine=nisa.engine.gpsimd,
        )


def store(y, first, start, columns, sums, count):
    """Round and write a strip of results."""
    for at in range(0, columns, 512):
        here = min(512, columns - at)
        for m in range(count):
            token = first + 128 * m
            tokens = min(128, y.shape[0] - token)
            rounded = nl.ndarray((tokens, here), dtype=nl.bfloat16, buffer=nl.sbuf)
            nisa.tensor_copy(dst=rounded, src=sums[at // 512 * count + m][0:tokens, 0:here], engine=nisa.engine.scalar)
            nisa.dma_copy(dst=y[token : token + tokens, start + at : start + at + here], src=rounded)
