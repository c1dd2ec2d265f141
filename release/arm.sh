#!/usr/bin/env bash
# The wheel for 64-bit ARM, cross-compiled on Debian or Ubuntu on x86-64, and its tests under qemu-user. As root:
#
#     release/arm.sh setup               # compilers, qemu, and a small Debian for ARM in $KVFLASH_ARM_ROOT; some minutes
#     release/arm.sh wheel               # dist/*_aarch64.whl
#     release/arm.sh test [PYTEST...]    # on the wheel. QEMU_CPU chooses a processor; see arm_limit.py for KVFLASH_ARM_LIMIT
#     release/arm.sh sh COMMAND          # a command there; this clone is /src
#     release/arm.sh free                # before $KVFLASH_ARM_ROOT is removed: this machine's /dev is bound there
set -euo pipefail
cd "$(dirname "$0")/.."

root=${KVFLASH_ARM_ROOT:-/var/arm64}
python=.venv/bin/python
tests=/tests/bin/python # a virtual environment there

mounted() { mountpoint -q "$root/$1" || mount "${@:2}" "$root/$1"; }

# the kernel starts ARM's programs by qemu, in any root
registered() {
    local at=/proc/sys/fs/binfmt_misc
    [ -e $at/register ] || mount -t binfmt_misc binfmt_misc $at
    [ -e $at/qemu-aarch64 ] || /usr/lib/systemd/systemd-binfmt 2>/dev/null || true
    [ -e $at/qemu-aarch64 ] || printf '%s' ':qemu-aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:/usr/bin/qemu-aarch64-static:OCF' > $at/register
}

inside() {
    registered
    mkdir -p "$root/src"
    mounted proc -t proc proc
    mounted dev --rbind --make-rslave /dev
    [ "$root/src" -ef . ] || { umount "$root/src" 2>/dev/null || true; mount --bind "$PWD" "$root/src"; } # or another clone's
    chroot "$root" /usr/bin/env -i HOME=/root PATH=/tests/bin:/usr/bin:/bin LANG=C.UTF-8 "${env[@]}" /bin/sh -c 'cd /src && exec "$@"' sh "$@"
}

# names of the wheels that pip may take for ARM, of a glibc that is not newer than Debian 12's
platforms() {
    local old
    for old in 2014 _2_17 _2_24 _2_26 _2_27 _2_28 _2_31 _2_34 _2_35 _2_36; do
        echo "--platform manylinux${old}_aarch64"
    done
}

case ${1:-help} in
setup)
    apt-get install -y --no-install-recommends debootstrap debian-archive-keyring g++-aarch64-linux-gnu qemu-user-static
    registered
    [ -e "$root/usr/include/python3.11" ] || debootstrap --variant=minbase --arch=arm64 \
        --include=python3,python3-venv,python3-dev,ca-certificates,git,g++,procps bookworm "$root"
    cp /etc/resolv.conf "$root/etc/"
    [ -e "$root$tests" ] || { env=(); inside python3 -m venv --without-pip /tests; }
    make .venv/.tools
    mkdir -p build
    # what the tests need. this machine's pip takes seconds, and that under qemu many minutes
    $python - <<'END' > build/arm-requirements.txt
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
wanted = project["dependencies"] + extras["plot"] + extras["test"] + extras["clients"] + ["pyyaml"]
print("\n".join(name for name in wanted if not name.startswith("pyllama")))
END
    # shellcheck disable=SC2046
    $python -m pip install --quiet --disable-pip-version-check --upgrade --target "$root/tests/lib/python3.11/site-packages" \
        --only-binary :all: --implementation cp --python-version 3.11 --abi cp311 --abi abi3 --abi none $(platforms) \
        --requirement build/arm-requirements.txt
    ;;
wheel)
    # Debian's pyconfig.h is in a folder of the processor's
    mkdir -p build/arm-python
    cp -r "$root"/usr/include/python3.11/. "$root"/usr/include/aarch64-linux-gnu/python3.11/. build/arm-python/
    export KVFLASH_ARM_PYTHON=$PWD/build/arm-python CMAKE_TOOLCHAIN_FILE=$PWD/release/aarch64.cmake
    export LD_LIBRARY_PATH=/usr/aarch64-linux-gnu/lib # of libgomp, for auditwheel; programs of this machine pass it over
    make wheel WHEEL_OPTIONS=--aarch64
    ;;
test)
    wheel=$(ls -t dist/*_aarch64.whl | head -n 1) # the newest
    [ "$root/tests/installed" -nt "$wheel" ] || $python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
        --target "$root/tests/lib/python3.11/site-packages" --only-binary :all: --python-version 3.11 --abi abi3 \
        $(platforms) "$wheel"
    # pip puts commands of a --target elsewhere
    printf '#!%s\nimport sys\nfrom pyllama_kvflash.__main__ import main\nsys.exit(main())\n' $tests > "$root/tests/bin/kvflash"
    chmod +x "$root/tests/bin/kvflash"
    touch "$root/tests/installed"
    env=(KVFLASH_WHEEL="$wheel" KVFLASH_TEST_THREADS=1 PYTHONPATH=/src/tests:/src/release PYTHONSAFEPATH=1 QEMU_CPU="${QEMU_CPU:-cortex-a72}")
    env+=(KVFLASH_NIGHTLY="${KVFLASH_NIGHTLY:-HEAD}" KVFLASH_ARM_LIMIT="${KVFLASH_ARM_LIMIT:-0}")
    inside $tests -m pytest -p arm_limit -o faulthandler_timeout=0 "${@:2}"
    ;;
sh)
    env=(KVFLASH_TEST_THREADS=1 PYTHONPATH=/src/tests QEMU_CPU="${QEMU_CPU:-cortex-a72}")
    inside "${@:2}"
    ;;
free)
    for at in dev proc src; do
        ! mountpoint -q "$root/$at" || umount -R "$root/$at"
    done
    ;;
*)
    sed -n 's/^# \{0,1\}//p' "$0" | sed 1d | head -n 7
    exit 2
    ;;
esac
