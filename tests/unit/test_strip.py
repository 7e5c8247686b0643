"""Stripping output code: what is kept, what goes, and that whatever is not known is refused by name."""

from __future__ import annotations

import pytest

from piecework.seam.strip import strip_output
from piecework.seam.vocabulary import Refusal

MODULE = '''
"""Compile-time auto-tuning block"""
# AOT ID: ['0_inference']
import torch
from torch._inductor.async_compile import AsyncCompile
aten = torch.ops.aten
async_compile = AsyncCompile()

cpp_fused_add_0 = async_compile.cpp_pybinding(['const float*'], r"""int main() {}  // /home/someone/kernel.cpp""")
cpp_fused_unused_1 = async_compile.cpp_pybinding(['const float*'], r"""int main() {}""")

async_compile.wait(globals())
del async_compile

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        arg0_1, arg1_1, arg2_1 = args
        args.clear()
        s95 = arg0_1
{body}

runner = Runner(partitions=[])
call = runner.call

def get_args():
    from torch._dynamo.testing import rand_strided
    return []

if __name__ == "__main__":
    pass
'''


def module(*lines: str) -> str:
    return MODULE.replace("{body}", "\n".join(f"        {line}" for line in lines))


def strip(*lines: str, **more: object) -> str:
    return strip_output(module(*lines), ("s0", "x0", "w0"), ("w0",), **more).text  # type: ignore[arg-type]


def test_only_what_runs_is_kept() -> None:
    text = strip(
        "assert_size_stride(arg1_1, (s95, 4), (4, 1), 'input')",
        "buf0 = empty_strided_cpu((s95, 4), (4, 1), torch.float32)",
        "# Topologically Sorted Source Nodes: [linear]",
        "extern_kernels.addmm(arg1_1, arg1_1, reinterpret_tensor(arg2_1, (4, 4), (1, 4), 0), alpha=1, out=buf0)",
        "del arg1_1",
        "del arg2_1",
        "buf1 = buf0; del buf0  # reuse",
        "cpp_fused_add_0(buf1, 2*s95)",
        "del arg0_1",
        "return (reinterpret_tensor(buf1, (s95, 2, 2), (4, 2, 1), 0), )",
    )
    assert (
        text
        == """\
addmm = torch.addmm
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
float32 = torch.float32
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor


def prepare(w0):
    c0 = reinterpret_tensor(w0, (4, 4), (1, 4), 0)
    return {"c0": c0}


def call(s0, x0):
    buf0 = empty_strided_cpu((s0, 4), (4, 1), float32)
    addmm(x0, x0, c0, out=buf0)
    buf1 = buf0
    del buf0
    cpp_fused_add_0(buf1, 2 * s0)
    return (reinterpret_tensor(buf1, (s0, 2, 2), (4, 2, 1), 0),)
"""
    )


def test_kernels_that_are_called_are_named_and_no_other() -> None:
    result = strip_output(
        module("cpp_fused_add_0(arg1_1)", "buf0 = torch.ops.mine.op.default(arg1_1)", "return (buf0, )"),
        ("s0", "x0", "w0"),
        ("w0",),
    )
    assert result.kernels == ("cpp_fused_add_0",)
    assert result.namespaces == ("mine",)
    assert result.returns == ("buf0",)


def test_a_weight_view_used_twice_is_prepared_once() -> None:
    view = "reinterpret_tensor(arg2_1, (2, 8), (8, 1), 4)"
    text = strip(f"buf0 = {view}", f"extern_kernels.mm(arg1_1, {view}, out=buf0)", "return (buf0, )")
    assert text.count("reinterpret_tensor(w0") == 1
    assert "    buf0 = c0\n    mm(x0, c0, out=buf0)\n" in text


def test_a_weight_view_that_depends_on_a_size_stays_in_the_call() -> None:
    text = strip("return (reinterpret_tensor(arg2_1, (s95, 4), (4, 1), 0), )")
    assert "prepare" not in text
    assert "return (reinterpret_tensor(w0, (s0, 4), (4, 1), 0),)" in text


def test_the_compilers_own_names_never_shadow_ours() -> None:
    text = strip(
        "arg1_1_size = arg1_1.size()",
        "x0 = arg1_1_size[0]",
        "buf0 = empty_strided_cpu((x0, 4), (4, 1), torch.float32)",
        "cpp_fused_add_0(arg1_1, buf0, x0)",
        "return (buf0, )",
    )
    assert "x0_ = arg1_1_size[0]" in text
    assert "cpp_fused_add_0(x0, buf0, x0_)" in text


def test_size_arithmetic_keeps_its_meaning() -> None:
    text = strip(
        "buf0 = empty_strided_cpu((max(1, (1 + s95) // 2), (-1)*s95 % 3, math.floor(s95 / 2)), (4, 2, 1), torch.bool)",
        "return (buf0, s95*(s95 + 1), None, -1.5)",
    )
    assert "(max(1, (1 + s0) // 2), ((-1) * s0) % 3, math_floor(s0 / 2))" in text
    assert "bool_ = torch.bool" in text
    assert "return (buf0, s0 * (s0 + 1), None, -1.5)" in text


def test_constants_of_the_graph_stand_in_the_text() -> None:
    text = strip(
        "cpp_fused_add_0(_tensor_constant0, arg1_1)",
        "return (arg1_1, )",
        constants={"_tensor_constant0": "torch.tensor([1.0, 2.0], dtype=torch.float32)", "unused": "torch.tensor(1)"},
    )
    assert "_tensor_constant0 = torch.tensor([1.0, 2.0], dtype=torch.float32)" in text
    assert "unused" not in text


def test_misaligned_inputs_are_copied_or_refused_at_the_call() -> None:
    text = strip("arg2_1 = copy_if_misaligned(arg2_1)", "return (arg1_1, )", aligned={"x0": True})
    assert "def prepare(w0):\n    w0 = copy_if_misaligned(w0)" in text
    assert "def call(s0, x0):\n    x0 = check_aligned(x0)\n" in text


def test_triton_kernels_take_their_stream_last() -> None:
    text = strip(
        "with torch.cuda._DeviceGuard(0):",
        "    torch.cuda.set_device(0)",
        "    buf0 = empty_strided_cuda((s95, 4), (4, 1), torch.bfloat16)",
        "    stream0 = get_raw_stream(0)",
        "    cpp_fused_add_0.run(arg1_1, buf0, 4*s95, stream=stream0)",
        "return (buf0, )",
    )
    assert "    stream0 = get_raw_stream(device_index)\n    cpp_fused_add_0(x0, buf0, 4 * s0, stream0)\n" in text
    assert "DeviceGuard" not in text
    assert "set_device" not in text


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("buf0 = extern_kernels.secret(arg1_1)", "unknown call of `extern_kernels.secret`"),
        ("buf0 = __import__('os')", "unknown call of `__import__`"),
        ("buf0 = torch._inductor.thing(arg1_1)", "unknown call of `torch._inductor.thing`"),
        ("buf0 = torch.ops.higher_order.cond(arg1_1)", "unknown operator `torch.ops.higher_order.cond`"),
        ("buf0 = torch.ops.inductor.lookup_seed.default(arg1_1, 0)", "exists inside the compiler only"),
        ("buf0 = mystery", "unknown name: `mystery`"),
        ("arg1_1 = buf7", "unknown name: `buf7`"),
        ("arg1_1 = empty_strided_cpu((1, ), (1, ), torch.float32)", "assigns to its input `arg1_1`"),
        ("for i in range(3): pass", "unknown statement"),
        ("arg1_1.secret()", "unknown call of `arg1_1.secret`"),
        ("buf0 = [x for x in arg1_1]", "unknown expression"),
        ("cpp_fused_add_0(**arg1_1)", "unknown call"),
        ("with open('x') as f:\n            pass", "unknown block"),
    ],
)
def test_what_is_not_known_is_refused_by_name(line: str, reason: str) -> None:
    with pytest.raises(Refusal) as caught:
        strip(line, "return (arg1_1, )")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (module("return (arg1_1, )").replace("partitions=[])", "partitions=[p0])"), "runs in partitions"),
        (module("return (arg1_1, )") + "\ndef partition_0(args):\n    pass\n", "unknown part"),
        ("x = 1\n", "has no function `call`"),
        (module("cpp_fused_add_0(arg1_1)"), "has no return"),
        (module("return (arg1_1, )").replace("arg0_1, arg1_1, arg2_1 =", "arg0_1, arg1_1 ="), "takes 2 inputs"),
    ],
)
def test_a_module_of_another_shape_is_refused(source: str, reason: str) -> None:
    with pytest.raises(Refusal, match=reason):
        strip_output(source, ("s0", "x0", "w0"), ("w0",))


def test_the_text_holds_no_path() -> None:
    assert "/" not in strip("cpp_fused_add_0(arg1_1)", "return (arg1_1, )")
