#!/bin/bash
# Make the environment that the comparison runs the other systems in.
#
#   PEERS=/some/temp/folder benchmarks/peers/make_environment.sh
#
# Makes $PEERS/venv (torch, CPU build, and the packages that the two systems import) and $PEERS/vllm, $PEERS/sglang
# (their wheels, unzipped, never installed: an install would bring a CUDA torch along). About 3.5 GB; nothing of it
# belongs in the repository. A second call finishes what a first one began.
set -euo pipefail

TORCH=${TORCH:-2.13.0}
VLLM=${VLLM:-0.33.0}
SGLANG=${SGLANG:-0.5.23}
TRITON=${TRITON:-3.7.1}
PYTHON=${PYTHON:-python3.11}
PEERS=${PEERS:?set PEERS to a folder outside the repository}
repository=$(cd "$(dirname "$0")/../.." && pwd)
PEERS=$(realpath -m "$PEERS")
case $PEERS/ in
    "$repository"/*) echo "PEERS=$PEERS lies inside the repository; choose a folder outside it" >&2; exit 2 ;;
esac

mkdir -p "$PEERS"
[ -x "$PEERS/venv/bin/pip" ] || "$PYTHON" -m venv "$PEERS/venv"
pip="$PEERS/venv/bin/pip"
"$pip" install -q "torch==$TORCH"
echo "torch==$("$PEERS/venv/bin/python" -c 'import torch; print(torch.__version__)')" > "$PEERS/constraint.txt"
# What the compile layers import before they compile anything. A server-side package that is imported and never
# called is left out: `stand_ins.py` answers for it.
"$pip" install -q -c "$PEERS/constraint.txt" \
    aiohttp cachetools cbor2 cloudpickle dill einops fastapi filelock gguf huggingface_hub ijson IPython jsonschema \
    lark mistral_common msgspec ninja numpy openai opentelemetry-api orjson packaging partial-json-parser pillow \
    prometheus_client protobuf psutil py-cpuinfo pybase64 pydantic python-json-logger pyyaml pyzmq regex requests \
    safetensors sentencepiece setproctitle setuptools six tiktoken tokenizers tqdm "transformers==5.17.0" \
    typing_extensions uvicorn uvloop watchfiles wheel xxhash blake3 interegular depyf==0.20.0
"$pip" install -q --no-deps compressed-tensors==0.17.0 oss-harmony

unzipped() { # name version
    [ -d "$PEERS/$1" ] && return
    rm -rf "$PEERS/$1.part" && mkdir -p "$PEERS/$1.part" "$PEERS/wheels"
    "$pip" download -q --no-deps -d "$PEERS/wheels" "$1==$2"
    "$PEERS/venv/bin/python" -m zipfile -e "$PEERS"/wheels/"$1"-"$2"*.whl "$PEERS/$1.part"
    mv "$PEERS/$1.part" "$PEERS/$1"
}
unzipped vllm "$VLLM"
unzipped sglang "$SGLANG"
# SGLang imports Triton at once, also where there is no GPU. It lies apart, since the others run on a CPU without it.
unzipped triton "$TRITON"
"$PEERS/venv/bin/python" -c 'import torch; assert torch.version.cuda is None, torch.version.cuda'
echo "ready: PEERS=$PEERS"
