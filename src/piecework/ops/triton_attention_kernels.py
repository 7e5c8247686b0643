"""The kernels of paged attention: write a step's rows, attend tiles of rows over pages, put parts of keys together."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["slots"])  # type: ignore[untyped-decorator]
def write(  # type: ignore[no-untyped-def]
    key, value, keys, values, slots, key_stride, value_stride, slot_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write one row of keys and values to its slot; a slot below 0 is none."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_written = (at < WIDTH) & (slot >= 0)
    tl.store(keys + slot * slot_stride + at, tl.load(key + row * key_stride + at, mask=is_written), mask=is_written)
    value_at = values + slot * slot_stride + at
    tl.store(value_at, tl.load(value + row * value_stride + at, mask=is_written), mask=is_written)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["window", "num_rows", "table_width", "splits"],
    do_not_specialize_on_alignment=["tiles", "page_table"],
)
def attend(  # type: ignore[no-untyped-def]
    query, out, partial, statistics, keys, values, tiles, page_table, sinks, scaling, softcap, window, num_rows,
    table_width, splits, row_stride, page_stride, slot_stride,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE_: tl.constexpr, KEYS_: tl.constexpr,
    HAS_ROWS: tl.constexpr, IS_SPLIT: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Attend a tile of a sequence's rows, for the heads of one key head, over one part of the sequence's keys."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if HAS_ROWS:
        first_row, rows, first_position, sequence = tile, 1, tl.load(tiles + tile) - 1, tile
    else:
        first_row, rows = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
        first_position, sequence = tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
    at, width = tl.arange(0, TILE_), tl.arange(0, WIDTH)
    is_row, row = at // GROUP < rows, first_row + at // GROUP
    head = kv_head * GROUP + at % GROUP
    position = first_position + at // GROUP
    place = row[:, None] * row_stride + head[:, None] * WIDTH + width[None, :]
    queries = tl.load(query + place, mask=is_row[:, None], other=0.0)
    highest = tl.full([TILE_], float("-inf"), tl.float32)
    total, summed = tl.zeros([TILE_], tl.float32), tl.zeros([TILE_, WIDTH], tl.float32)
    keys_per_split = tl.cdiv(tl.cdiv(first_position + rows, splits), KEYS_) * KEYS_
    end, begin = tl.minimum(first_position + rows, (split + 1) * keys_per_split), split * keys_per_split
    if window > 0:
        begin = tl.maximum(begin, (first_position - window + 1) // KEYS_ * KEYS_)
    for start in range(begin, end, KEYS_):
        key_at = start + tl.arange(0, KEYS_)
        is_key = (key_at < end) & (key_at >= 0)
        page = tl.load(page_table + sequence * table_width + key_at // PAGE, mask=is_key, other=0).to(tl.int64)
        base = page * page_stride + (key_at % PAGE) * slot_stride + kv_head * WIDTH
        key = tl.load(keys + base[None, :] + width[:, None], mask=is_key[None, :], other=0.0)
        scores = tl.dot(queries, key, input_precision="ieee") * scaling
        if HAS_CAP:
            bent = scores / softcap  # tanh, written with exp so that no library of device functions is needed
            scores = softcap * (1 - 2 / (tl.exp(2 * bent) + 1))
        seen = is_key[None, :] & (key_at[None, :] <= position[:, None])
        if window > 0:
            seen = seen & (key_at[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        base_now = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp(scores - base_now[:, None])
        scale = tl.exp(tl.where(highest == float("-inf"), float("-inf"), highest - base_now))
        value = tl.load(values + base[:, None] + width[None, :], mask=is_key[:, None], other=0.0)
        summed = tl.dot(weights.to(value.dtype), value, summed * scale[:, None], input_precision="ieee")
        total = total * scale + tl.sum(weights, 1)
        highest = now
    if not IS_SPLIT:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
            now = tl.maximum(highest, sink)
            summed = summed * tl.exp(highest - now)[:, None]
            total = total * tl.exp(highest - now) + tl.exp(sink - now)
        whole = tl.where(total == 0.0, 1.0, total)  # of padding
        tl.store(out + place, (summed / whole[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])
    else:
        kept = (split * num_rows + row) * tl.num_programs(1) * GROUP + head
        tl.store(partial + kept[:, None] * WIDTH + width[None, :], summed, mask=is_row[:, None])
        tl.store(statistics + kept * 2, highest, mask=is_row)
        tl.store(statistics + kept * 2 + 1, total, mask=is_row)


@triton.jit(do_not_specialize=["num_rows", "splits"])  # type: ignore[untyped-decorator]
def combine(  # type: ignore[no-untyped-def]
    out, partial, statistics, sinks, num_rows, splits, heads, row_stride,
    WIDTH: tl.constexpr, MOST: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Put the parts of one row's keys together, for one head."""
    row, head = tl.program_id(0), tl.program_id(1)
    split, width = tl.arange(0, MOST), tl.arange(0, WIDTH)
    is_split = split < splits
    kept = (split * num_rows + row) * heads + head
    highest = tl.load(statistics + kept * 2, mask=is_split, other=float("-inf"))
    total = tl.load(statistics + kept * 2 + 1, mask=is_split, other=0.0)
    now = tl.max(highest, 0)
    if HAS_SINKS:
        now = tl.maximum(now, tl.load(sinks + head).to(tl.float32))
    scale = tl.where(highest == float("-inf"), 0.0, tl.exp(highest - now))
    parts = tl.load(partial + kept[:, None] * WIDTH + width[None, :], mask=is_split[:, None], other=0.0)
    summed = tl.sum(parts * scale[:, None], 0)
    whole = tl.sum(total * scale, 0)
    if HAS_SINKS:
        whole += tl.exp(tl.load(sinks + head).to(tl.float32) - now)
    whole = tl.where(whole == 0.0, 1.0, whole)  # of padding
    tl.store(out + row * row_stride + head * WIDTH + width, (summed / whole).to(out.dtype.element_ty))
