#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `make try-wheels`: what a new user does, from nothing but a folder of wheels. As an unprivileged user, with an empty
# home, without a compiler on the path and without a package index: a venv, an installation, the first AllReduce. Prints
# the seconds of each. build/wheelhouse keeps what pip has downloaded beside our wheels.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

say() { printf 'try-wheels: %s\n' "$*"; }
house=$PWD/build/wheelhouse
mkdir -p "$house"
rm -f "$house"/sennit*.whl
.venv/bin/python -m pip --disable-pip-version-check download --quiet --find-links build/wheels --constraint \
  build/constraints.txt --dest "$house" sennit sennit-torch 2>build/try-wheels.log || { cat build/try-wheels.log >&2; exit 1; }

# Another user can read neither this checkout nor root's home.
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
mkdir "$place/home"
cp -r "$house" "$place/wheelhouse"
cat >"$place/first.py" <<'PROGRAM'
import torch
import torch.distributed as dist

dist.init_process_group("sennit")
rank, world = dist.get_rank(), dist.get_world_size()
gradients = torch.full((1024,), float(rank + 1))
dist.all_reduce(gradients)
assert gradients.eq(world * (world + 1) / 2).all()
if rank == 0:
    print(f"AllReduce of {world} ranks over {dist.get_backend()}: {gradients[0].item():g}")
dist.destroy_process_group()
PROGRAM
cat >"$place/steps.sh" <<'STEPS'
cd "$HOME"
for tool in cc gcc c++ g++ clang cmake ninja make; do
  ! command -v "$tool" >/dev/null || { echo "try-wheels: error: $tool is on the path" >&2; exit 1; }
done
since() { echo "$((${EPOCHREALTIME/./} - ${1/./}))e-6"; }
seconds() { local from=$EPOCHREALTIME; "$@"; printf '%6.1f s  %s\n' "$(since "$from")" "${*: -3}"; }
begin=$EPOCHREALTIME
seconds "$PYTHON" -m venv env
PATH=$HOME/env/bin
seconds pip install --quiet --no-index --find-links "$HOUSE" sennit sennit-torch
seconds torchrun --standalone --nproc-per-node 2 "$FIRST"
printf '%6.1f s  from nothing to the first AllReduce\n' "$(since "$begin")"
shown() { "$@" >&3; }
exec 3>home.txt
seconds shown sennit --help
seconds shown sennit doctor
STEPS
command=(env -i HOME="$place/home" PATH=/nonexistent LANG=C.UTF-8 PYTHON="${PYTHON:-/usr/bin/python3}" PIP_CONFIG_FILE=/dev/null
  PIP_DISABLE_PIP_VERSION_CHECK=1 HOUSE="$place/wheelhouse" FIRST="$place/first.py" /bin/bash -eu "$place/steps.sh")
if [ "$(id -u)" -eq 0 ]; then
  chmod 755 "$place"
  chown -R 65534:65534 "$place/home"
  command=(setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs "${command[@]}")
  say "as the user nobody, without capabilities"
fi
"${command[@]}"
