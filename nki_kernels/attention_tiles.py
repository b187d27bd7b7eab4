"""Parts of the attention kernels: they cut a cache into tiles, mark the slots that are seen, and guard against garbage.

Functions of this file run inside kernels: plain NKI, undecorated.

A cache [N, K, S, h] is read in blocks of `tiles` x 128 slots. Partition p of a block holds the slots start + p * tiles
+ t, so that a partition's part is one contiguous run of tiles * h elements in HBM.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

# Slots a partition reads at once: 4 KiB of a bfloat16 head of 128, which saturates the DMA engines.
BLOCK_TILES = 16
# A score below every real one, yet so far above the least float32 that its differences and multiples stay finite.
FLOOR = -1e30
FP32_MIN = -3.4028234663852886e38
# How many of 16 tiles GpSimd clears while the Vector engine clears the others.
GPSIMD_SHARE = 6
# The position of lanes that hold no slot: no span reaches it, and float32 holds it and its neighbours exactly.
NOWHERE = 8388608


def is_float8(dtype):
    return dtype == nl.float8_e4m3 or dtype == nl.float8_e4m3fn or dtype == nl.float8_e5m2


def unit_of(scale, softcap):
    """The factor on scores before the exponential. Capped scores are tangents, so their factor is the cap."""
    if softcap > 0.0:
        return softcap
    return scale


def work_dtype(cache):
    """The dtype of the products with keys and with weights: the cache's, or bfloat16 for float8."""
    if is_float8(cache.dtype):
        return nl.bfloat16
    return cache.dtype


def cut_slots(slots, cores, core):
    """[(start, partitions, tiles)]: the blocks of a contiguous cache that this core reads, in turn with the other."""
    tiles = slots // 128
    most = max(1, min(BLOCK_TILES, (tiles + cores - 1) // cores))
    blocks = []
    start = 0
    turn = 0
    while start < slots:
        here = min(most, (slots - start) // 128)
        block = (start, 128, here)
        if here == 0:
            block = (start, slots - start, 1)
        if turn % cores == core:
            blocks.append(block)
        start = start + block[1] * block[2]
        turn = turn + 1
    return blocks


def cut_pages(slots, row, cores, core):
    """[(start, partitions, tiles)]: the blocks of a paged cache, whose partitions each read `row` slots of one page."""
    rows = slots // row
    blocks = []
    for turn in range((rows + 127) // 128):
        if turn % cores == core:
            blocks.append((turn * 128 * row, min(128, rows - turn * 128), row))
    return blocks


def count_tiles(blocks):
    total = 0
    for block in blocks:
        total = total + block[2]
    return total


def slot_positions(blocks):
    """[128, tiles of all blocks] float32 in SBUF: the slot that each lane of each tile holds."""
    positions = nl.ndarray((128, max(1, count_tiles(blocks))), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=positions, value=float(NOWHERE))
    tile = 0
    for block in blocks:
        start, lanes, tiles = block
        nisa.iota(
            dst=positions[0:lanes, tile : tile + tiles], pattern=[[1, tiles]], offset=start, channel_multiplier=tiles
        )
        tile = tile + tiles
    return positions


def load_spans(spans, row):
    """[128, 2, n] float32 in SBUF: first slot and count of every span of this row, in every lane."""
    n = spans.shape[2]
    tile = nl.ndarray((128, 2, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=spans.ap(pattern=[[0, 128], [n, 2], [1, n]], offset=row * 2 * n))
    return tile


def mark_span(dst, positions, spans, i, slots, value):
    """dst = value where a lane's slot is in span i, which wraps at `slots`, else 0."""
    ahead = nl.ndarray(positions.shape, dtype=nl.float32, buffer=nl.sbuf)
    wrapped = nl.ndarray(positions.shape, dtype=nl.float32, buffer=nl.sbuf)
    first = spans[:, 0, i : i + 1]
    count = spans[:, 1, i : i + 1]
    nisa.tensor_scalar(dst=ahead, data=positions, op0=nl.subtract, operand0=first)
    nisa.tensor_scalar(dst=wrapped, data=ahead, op0=nl.less, operand0=0.0, op1=nl.multiply, operand1=float(slots))
    nisa.tensor_tensor(dst=ahead, data1=ahead, data2=wrapped, op=nl.add)
    nisa.tensor_scalar(dst=dst, data=ahead, op0=nl.less, operand0=count, op1=nl.multiply, operand1=value)


def clear_unseen(dst, tile, live):
    """dst = tile where its lane's slot is live, else 0: 0 * NaN would be NaN. tile [128, tiles, h], live [128, tiles].

    Bits times 1 or 0 in exact integers, on GpSimd, or through a mask of bits on the Vector engine, whichever is free.
    """
    words = tile.view(nl.int32)
    cleared = dst.view(nl.int32)
    tiles, size = words.shape[1], words.shape[2]
    here = tiles - tiles * GPSIMD_SHARE // 16
    mask = nl.ndarray((128, here), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=mask, data=live[:, 0:here], op0=nl.multiply, operand0=-1.0)
    nisa.tensor_tensor(
        dst=cleared[:, 0:here, :],
        data1=words[:, 0:here, :],
        data2=mask.expand_dim(2).broadcast(2, size),
        op=nl.bitwise_and,
        engine=nisa.engine.vector,
    )
    if here < tiles:
        nisa.tensor_tensor(
            dst=cleared[:, here:tiles, :],
            data1=words[:, here:tiles, :],
            data2=live[:, here:tiles].expand_dim(2).broadcast(2, size),
            op=nl.multiply,
            engine=nisa.engine.gpsimd,
        )


def identity(dtype):
    """[128, 128] identity in SBUF."""
    ones = nl.ndarray((128, 128), dtype=dtype, buffer=nl.sbuf)
    made = nl.ndarray((128, 128), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    nisa.affine_select(
        dst=made,
        pattern=[[-1, 128]],
        channel_multiplier=1,
        on_true_tile=ones,
        on_false_value=0.0,
        cmp_op=nl.equal,
    )
    return made


def spread(column, width):
    """[P, 1] -> [P, width] in SBUF, every column the same."""
    made = nl.ndarray((column.shape[0], width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=made, src=column.broadcast(1, width))
    return made


def turn_queries(queries, work):
    """[n, h] in HBM, n <= 128 -> [h / pieces, pieces, n] in SBUF: sizes on partitions, at most 128 of them."""
    n, size = queries.shape
    pieces = (size + 127) // 128
    part = size // pieces
    loaded = nl.ndarray((n, size), dtype=queries.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=loaded, src=queries)
    cast = nl.ndarray((n, size), dtype=work, buffer=nl.sbuf)
    nisa.tensor_copy(dst=cast, src=loaded)
    turned = nl.ndarray((part, pieces, n), dtype=work, buffer=nl.sbuf)
    for piece in range(pieces):
        moved = nl.ndarray((part, n), dtype=work, buffer=nl.psum)
        nisa.nc_transpose(dst=moved, data=cast[:, piece * part : (piece + 1) * part], engine=nisa.engine.tensor)
        nisa.tensor_copy(dst=turned[:, piece, :], src=moved)
    return turned


def guard_keys(loaded, live, work):
    """Keys that `turn_keys` can take. It turns float8 keys by a product, which would spread garbage."""
    if loaded.dtype == work:
        return loaded
    keys = nl.ndarray(loaded.shape, dtype=loaded.dtype, buffer=nl.sbuf)
    clear_unseen(keys, loaded, live)
    return keys


def keys_a_bank(keys, work):
    """Tiles of keys whose transposes fill a PSUM bank: the keys' own dtype, or products in float32."""
    pieces = (keys.shape[2] + 127) // 128
    if keys.dtype == work and work != nl.float32:
        return 8 // pieces
    return 4 // pieces


def turn_keys(flipped, keys, eye):
    """flipped [h / pieces, pieces, tiles * 128] = keys [128, tiles, h] transposed, through one PSUM bank."""
    part, pieces, _ = flipped.shape
    exact = keys.dtype == flipped.dtype
    kind = nl.float32
    if exact:
        kind = keys.dtype
    moved = nl.ndarray(flipped.shape, dtype=kind, buffer=nl.psum)
    for tile in range(keys.shape[1]):
        for piece in range(pieces):
            target = moved[:, piece, tile * 128 : (tile + 1) * 128]
            source = keys[:, tile, piece * part : (piece + 1) * part]
            if exact:
                nisa.nc_transpose(dst=target, data=source, engine=nisa.engine.tensor)
            else:
                nisa.nc_matmul(dst=target, stationary=source, moving=eye, accumulate=False)
    nisa.tensor_copy(dst=flipped, src=moved, engine=nisa.engine.scalar)
