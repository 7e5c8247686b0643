"""Fuse into the opaque operators of a step: turning a key with writing it, quantising with attending.

    fuse_rotary_kv_update     the turned key goes to the KV write alone, through views that turn its rows as a whole
    fuse_attention_quant_fp8    attention's result is read by quantisations by one number alone, through views

Both stand where the opaque operator stood: no cut is added and none goes.
"""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from piecework.passes.found import rewrite_each
from piecework.passes.reading import Miss, argument, call, called, drop, form_of, spec_of
from piecework.values.graph import TracedGraph
from piecework.values.signature import TensorSpec

_VIEWS = {"getitem", "view", "reshape", "transpose", "contiguous", "flatten", "unsqueeze", "squeeze", "permute"}


def fuse_rotary_kv_update(traced: TracedGraph) -> tuple[list[str], list[str]]:
    """Hand each KV write the key before it is turned, and its cosines and sines."""
    return rewrite_each(traced, "kv_update", _fuse_rotary)


def fuse_attention_quant_fp8(traced: TracedGraph) -> tuple[list[str], list[str]]:
    """Let each attention fill an 8-bit result where its result is quantised."""
    return rewrite_each(traced, "attention", _fuse_attention)


# ---------------------------------------------------------------------------------------------- key and KV write


def _fuse_rotary(graph: fx.Graph, write: fx.Node) -> str:
    key, value, site = (argument(write, index, name) for index, name in enumerate(("key", "value", "site")))
    steps: list[fx.Node] = []
    source = key
    while called(source) in ("getitem", "transpose", "to") and form_of(source) == "":
        steps.insert(0, source)
        source = source.args[0]
    if form_of(source) != "rotary":
        return ""
    for node in (source, *steps):
        stranger = next((user for user in node.users if user not in (*steps, write)), None)
        if stranger is not None:
            raise Miss(f"`{stranger.name}` reads the turned key too")
    views = [step for step in steps if called(step) != "to"]
    if [called(view) for view in views] != ["getitem", "transpose"] or views[0].args[1] != 0:
        raise Miss(f"the key comes to `{write.name}` through other views than those of flat tokens")
    if tuple(views[1].args[1:]) not in ((0, 1), (1, 0)):
        raise Miss(f"`{views[1].name}` turns other dimensions than heads and tokens")
    x, cos, sin, rotary_dim, interleaved = source.args
    for each in (cos, sin):
        _require_row_for_all_heads(each)
    _require_dtype_of(x, source, *steps)
    with graph.inserting_before(write):
        flat = [
            graph.call_method("transpose", (graph.call_function(operator.getitem, (each, 0)), 0, 1))
            for each in (x, cos, sin)
        ]
        made = call(graph, "rotary_kv_update", *flat, value, rotary_dim, interleaved, site)
    name = write.name
    write.replace_all_uses_with(made)
    graph.erase_node(write)
    drop(steps[-1])
    return f"rotary_kv_update for {name}"


def _require_dtype_of(key: Any, turned: fx.Node, *steps: fx.Node) -> None:
    """Raise a miss unless the turned key is written in the key's own dtype, rounded once if at all."""
    own = spec_of(key)
    dtypes = [spec.dtype for node in (turned, *steps) if isinstance(spec := spec_of(node), TensorSpec)]
    if own is None or len(dtypes) != len(steps) + 1 or dtypes[-1] != own.dtype:
        raise Miss("the turned key has another dtype than the key")
    if sum(one != other for one, other in pairwise(dtypes)) > 1:
        raise Miss("the turned key is rounded more than once")


def _require_row_for_all_heads(angles: Any) -> None:
    """Raise a miss unless cosines are [1, 1, T, N]: one row a token, the same for all heads."""
    spec = spec_of(angles)
    if spec is None or len(spec.shape) != 4 or spec.shape[:2] != (1, 1):
        raise Miss("the cosines are not one row a token for all heads")


# ------------------------------------------------------------------------------------------ attention and its result

_NAMES = ("query", "token", "out", "scaling", "sliding_window", "softcap", "sinks", "site")


def _fuse_attention(graph: fx.Graph, attend: fx.Node) -> str:
    query, token, out, *rule = (argument(attend, index, name) for index, name in enumerate(_NAMES))
    quants = _quantised(out, attend)
    if not quants:
        return ""
    scale = quants[0].args[1]
    if any(quant.args[1] is not scale for quant in quants):
        raise Miss("the result is quantised by more than one scale")
    _require_one_number(scale)
    _require_before(graph, scale, attend)
    if called(out) not in ("new_empty", "empty", "empty_like"):
        raise Miss(f"`{out.name}` is not made for the result alone")
    with graph.inserting_before(out):
        source, shape = query, spec_of(out)
        assert isinstance(shape, TensorSpec)
        made = graph.call_function(torch.empty_like, (source,), {"dtype": torch.float8_e4m3fn})
    if spec_of(query).shape != shape.shape:  # type: ignore[union-attr]
        graph.erase_node(made)
        raise Miss("the result has another shape than the query")
    if not _comes_before(graph, query, out):
        attend.prepend(made)
    with graph.inserting_before(attend):
        call(graph, "attention_quant_fp8", query, token, made, scale, *rule)
    name = attend.name
    graph.erase_node(attend)
    for quant in quants:
        quant.replace_all_uses_with(quant.args[0])  # type: ignore[arg-type]
        graph.erase_node(quant)
    out.replace_all_uses_with(made)
    drop(out)
    return f"attention_quant_fp8 for {name}"


def _quantised(out: Any, attend: fx.Node) -> list[fx.Node]:
    """Return the quantisations that read attention's result, through views; a miss where something else reads it."""
    found: list[fx.Node] = []
    others: list[fx.Node] = []
    waiting = [user for user in out.users if user is not attend]
    while waiting:
        user = waiting.pop()
        if form_of(user) == "quant_fp8_static":
            found.append(user)
        elif called(user) in _VIEWS and not form_of(user) and user.all_input_nodes[0] is not None:
            waiting += list(user.users)
        else:
            others.append(user)
    if found and others:
        raise Miss(f"`{others[0].name}` reads the result as it is")
    return found


def _require_one_number(scale: Any) -> None:
    spec = spec_of(scale)
    if spec is None or any(size != 1 for size in spec.shape):
        raise Miss("the scale is more than one number")


def _require_before(graph: fx.Graph, node: Any, later: fx.Node) -> None:
    if not _comes_before(graph, node, later):
        raise Miss(f"`{node.name}` is computed after attention")


def _comes_before(graph: fx.Graph, first: Any, second: fx.Node) -> bool:
    return next(node for node in graph.nodes if node in (first, second)) is first
