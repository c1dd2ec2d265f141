#!/usr/bin/env bash
# Build and check on a machine with a GPU and a CUDA toolkit, but no network.
#
#   bench/device.sh pack      here: .dev/ gets the patched llama.cpp tree and the wheels (about 20 MB); carry it along
#   bench/device.sh build     there: unpack, build for one architecture (KVFLASH_CUDA_ARCH, default 90a-real)
#   bench/device.sh test      there: the oracles with every layer on the GPU
#   bench/device.sh demo      there: the demonstration
set -euo pipefail
cd "$(dirname "$0")/.."

python=${KVFLASH_DEVICE_PYTHON:-3.12} # of the machine there
packages=(cffi click gguf hypothesis iniconfig markdown-it-py mdurl packaging patch-ng pathspec pluggy pycparser pygments
    pytest pyyaml rich scikit-build-core sortedcontainers tqdm)

case ${1:-} in
pack)
    mkdir -p .dev
    tar czf .dev/tree.tgz -C vendor llama.cpp
    rm -rf .dev/wheels
    .venv/bin/python -m pip download --quiet --no-deps --only-binary=:all: --python-version "$python" \
        --implementation cp --abi "cp${python/./}" --abi abi3 --abi none \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        --dest .dev/wheels "${packages[@]}"
    du -sh .dev
    ;;
build)
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
    rm -rf vendor/llama.cpp build
    tar xzf .dev/tree.tgz -C vendor
    python3 -m pip install --quiet --no-index --find-links .dev/wheels "${packages[@]}"
    begin=$SECONDS
    # an image may name a compiler that links libstdc++ statically into each library: they then crash in each other's copy
    [ -x /usr/bin/g++ ] && export CC=/usr/bin/gcc CXX=/usr/bin/g++ CUDAHOSTCXX=/usr/bin/g++
    CMAKE_ARGS="-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=${KVFLASH_CUDA_ARCH:-90a-real}" \
        python3 -m pip install --no-index --no-deps --no-build-isolation --editable . >build.log 2>&1 \
        || { tail -40 build.log; exit 1; }
    echo "built in $((SECONDS - begin)) s on $(nproc) cores"
    python3 -c 'from pyllama_kvflash import native; print(*native.devices(), sep="\n")'
    ;;
test)
    python3 -m pytest -q -p no:cacheprovider tests/test_oracles.py tests/test_mutations.py "${@:2}"
    ;;
demo)
    kvflash demo "${@:2}"
    ;;
*)
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
