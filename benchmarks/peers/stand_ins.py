"""Answer imports of server-side packages that a peer names at import and never calls in its compile layer.

`install(names)` puts a finder last on `sys.meta_path`, so a package that is really there always wins. A stand-in gives,
for any attribute, a class that can be subclassed, called, indexed, joined with `|` and used as a decorator.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
import typing

_SHARED = """
    anthropic astor av compressed_tensors flashinfer lark librosa llama_index llguidance lmformatenforcer mcp
    model_hosting_container_standards outlines outlines_core prometheus_fastapi_instrumentator pyairports quack ray
    soundfile sse_starlette tilelang torchcodec xgrammar
"""
VLLM = _SHARED.split()
SGLANG = [
    *VLLM,
    *"""
    blobfile cuda datasets decord decord2 deep_gemm easydict hf_transfer kernels modelscope pydantic_extra_types
    sgl_deep_gemm sgl_kernel smg_grpc_servicer torch_memory_saver torchao torchaudio zstandard
    """.split(),
]


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _AnyAttribute(type):
    """Make a class of which every attribute is such a class again."""

    def __getattr__(cls, name: str) -> type:
        if _is_special(name):
            raise AttributeError(name)
        value = _stand_in_class(name)
        setattr(cls, name, value)
        return value

    def __getitem__(cls, item: object) -> type:
        return cls

    def __or__(cls, other: object) -> object:
        return typing.Union[cls, other]  # noqa: UP007 - `|` is what is being defined

    def __ror__(cls, other: object) -> object:
        return typing.Union[other, cls]  # noqa: UP007

    def __iter__(cls) -> typing.Iterator[object]:
        return iter(())

    def __len__(cls) -> int:
        return 0


class _Anything(metaclass=_AnyAttribute):
    def __init__(self, *arguments: object, **named: object) -> None:
        pass

    def __call__(self, *arguments: object, **named: object) -> object:
        # Called with one function alone, it is a decorator.
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not named else self

    def __getattr__(self, name: str) -> type:
        if _is_special(name):
            raise AttributeError(name)
        return _stand_in_class(name)


def _stand_in_class(name: str) -> type:
    return _AnyAttribute(name, (_Anything,), {"__module__": __name__})


class _StandInModule(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if _is_special(name):
            raise AttributeError(name)
        value = _stand_in_class(name)
        setattr(self, name, value)
        return value


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find the named packages, and everything below them; `used` says which were asked for."""

    def __init__(self, names: typing.Iterable[str]) -> None:
        self.names = frozenset(names)
        self.used: set[str] = set()

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = fullname.split(".", 1)[0]
        # `importlib.util.find_spec` asks whether a package is there: the answer to that stays no.
        if not {fullname, top} & self.names or _asked_by("importlib.util"):
            return None
        self.used.add(top)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandInModule(spec.name)
        module.__dict__.update(__version__="0.0.0", __path__=[])
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _asked_by(module_name: str, depth: int = 12) -> bool:
    frame = sys._getframe(2)
    for _ in range(depth):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == module_name:
            return True
        frame = frame.f_back
    return False


def install(names: typing.Iterable[str]) -> StandIns:
    """Answer for `names` from now on, where nothing else does."""
    finder = StandIns(names)
    sys.meta_path.append(finder)
    return finder
