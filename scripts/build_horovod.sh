#!/usr/bin/env bash
# Builds Horovod against the torch of a Python environment and installs it there: scripts/build_horovod.sh [PYTHON]
# There is no wheel, and pip alone cannot build it: it requires torch at build time and a newer C++ than it requests.
set -euo pipefail

version=0.28.1
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
constraints=$scripts/../constraints.txt
cache=${XDG_CACHE_HOME:-$HOME/.cache}/worldsize/horovod
log=$cache/build.log

say() { echo "horovod: $*"; }
refuse() { say "$*" >&2; exit 64; }
# Shows the long build output only if the build fails.
logged() {
  "$@" >>"$log" 2>&1 && return
  tail -n 30 "$log" >&2
  say "failed; see the complete log: $log" >&2
  exit 1
}

[[ $(uname -s) == Linux ]] || refuse "requires Linux"
python=$("${1:-.venv/bin/python}" -c 'import sys; print(sys.executable)') || refuse "cannot run ${1:-.venv/bin/python}; pass a Python interpreter"
facts=$("$python" - <<'PY'
import importlib.util, os, pathlib, sys, sysconfig
import torch

nvidia = importlib.util.find_spec("nvidia")
roots = [pathlib.Path(root) for root in nvidia.submodule_search_locations] if nvidia else []
nccl = [str(root / "nccl") for root in roots if (root / "nccl/include/nccl.h").exists()]
headers = [str(path) for root in roots for path in sorted(root.glob("*/include"))]
# Unlike torch.cuda.get_arch_list(), this works without a GPU.
flags = getattr(torch._C, "_cuda_getArchFlags", str)() or ""
architectures = sorted({int(word[3:]) for word in flags.split() if word[3:].isdigit()})

memory = [int(line.split()[1]) * 1024 for line in open("/proc/meminfo") if line.startswith("MemAvailable")]
for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
    if os.path.exists(limit) and (text := open(limit).read().strip()).isdigit():
        memory.append(int(text))
# A compiler process uses up to 2.4 GiB.
jobs = max(1, min(len(os.sched_getaffinity(0)), int(min(memory) / 2.4 / 2**30)))

print(torch.__version__)
print(torch.version.cuda or "")
print("{}.{}".format(*sys.version_info))
print("cp{}{}{}".format(*sys.version_info[:2], sys.abiflags))
print(sysconfig.get_path("include"))
print(nccl[0] if nccl else "")
print(":".join(headers))
print(",".join(map(str, architectures)))
print(jobs)
PY
) || refuse "$python cannot import torch: run make first"
{
  read -r torch; read -r torch_cuda; read -r python_version; read -r python_tag; read -r python_headers
  read -r nccl; read -r cuda_headers; read -r architectures; read -r jobs
} <<<"$facts"

# Required packages ---------------------------------------------------------------------------------------------------

missing_packages() {
  local pair
  for pair in g++:g++ make:make cmake:cmake mpirun:openmpi-bin mpicxx:openmpi-bin ssh:openssh-client; do
    command -v "${pair%%:*}" >/dev/null || echo "${pair#*:}"
  done | sort -u
  mpicxx -fsyntax-only -x c++ - <<<'#include <mpi.h>' &>/dev/null || echo libopenmpi-dev
  [[ -e $python_headers/Python.h ]] || echo "python$python_version-dev"
}

mkdir -p "$cache"
: >"$log"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mapfile -t missing < <(missing_packages)
if ((${#missing[@]})); then
  if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    refuse "missing packages: ${missing[*]} (Debian names); install them and rerun this script"
  fi
  say "installing ${missing[*]}"
  logged apt-get update
  logged env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
  mapfile -t missing < <(missing_packages)
  ((${#missing[@]} == 0)) || refuse "still missing after apt-get install: ${missing[*]}"
fi
mpi=$(mpirun --version | sed -n 's/^mpirun (Open MPI) //p')
[[ $mpi ]] || refuse "mpirun is not from Open MPI; only Open MPI is supported"
cmake=$(cmake --version | sed -n 's/^cmake version //p')
[[ $(printf '%s\n' 3.21 "$cmake" | sort -V | head -n 1) == 3.21 ]] || refuse "requires CMake 3.21 or later; found $cmake"

# CPU or NCCL ---------------------------------------------------------------------------------------------------------

variant=cpu
nvcc=$(command -v nvcc || true)
for cuda in "${HOROVOD_CUDA_HOME:-}" "${CUDA_HOME:-}" "${CUDA_PATH:-}" "${nvcc%/bin/nvcc}" /usr/local/cuda; do
  [[ $torch_cuda && $cuda && -x $cuda/bin/nvcc ]] || continue
  release=$("$cuda/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
  nccl=${HOROVOD_NCCL_HOME:-$nccl}
  if [[ ${release%%.*} != "${torch_cuda%%.*}" ]]; then
    say "building without NCCL: $cuda is CUDA ${release:-unknown}, torch uses CUDA $torch_cuda"
  elif [[ ! $nccl ]]; then
    say "building without NCCL: its headers are not in $python's packages; set HOROVOD_NCCL_HOME to their folder"
  else
    # The GPU architectures that both torch and this nvcc support.
    known=$("$cuda/bin/nvcc" --list-gpu-code | sed s/sm_//)
    architectures=$(grep -Fx "$known" <<<"${architectures//,/$'\n'}" | paste -sd, || true)
    architectures=${HOROVOD_BUILD_CUDA_CC_LIST:-${architectures:-80,90}}
    variant=nccl-cuda$release-sm${architectures//,/.}
  fi
  break
done

# The wheel -----------------------------------------------------------------------------------------------------------

key=$version-torch$torch-$python_tag-$(uname -m)-openmpi$mpi-$variant
folder=$cache/$key
mkdir -p "$folder"
pip=("$python" -m pip --disable-pip-version-check)

# torch requires setuptools below 82; horovodrun uses its distutils; since 70.1 it builds wheels itself.
logged "${pip[@]}" install --constraint "$constraints" wheel packaging 'setuptools>=70.1,<82' \
  cffi cloudpickle psutil pyyaml

wheels=("$folder"/*.whl)
if [[ -e ${wheels[0]} ]]; then
  say "using the cached wheel ${wheels[0]}"
else
  # CMake 4 rejects the bundled Gloo without CMAKE_POLICY_VERSION_MINIMUM. gcc 13 no longer includes these headers
  # implicitly. Stripping debug information shrinks the wheel from 20 MB to 1 MB.
  settings=(
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
    HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1
    CMAKE_TOOLCHAIN_FILE="$scripts/horovod-cxx20.cmake"
    CMAKE_POLICY_VERSION_MINIMUM=3.5
    CXXFLAGS="-include stdexcept -include string -include cstdint -DFLATBUFFERS_USE_STD_SPAN ${CXXFLAGS:-}"
    LDFLAGS="-Wl,--strip-debug ${LDFLAGS:-}"
    MAKEFLAGS="-j$jobs"
  )
  # The same flags on every x86-64 machine: machines with different CPUs may share the home folder and so this cache.
  [[ $(uname -m) != x86_64 ]] || settings+=(HOROVOD_BUILD_ARCH_FLAGS="-mf16c -mavx -mfma")
  if [[ $variant == cpu ]]; then
    # If there is a CUDA folder and torch has CUDA, Horovod builds with CUDA. Hide torch's CUDA version from it.
    mkdir "$work/python"
    echo 'import torch; torch.version.cuda = None' >"$work/python/sitecustomize.py"
    settings=(-u HOROVOD_CUDA_HOME -u HOROVOD_GPU_OPERATIONS HOROVOD_WITHOUT_CUDA=1 "${settings[@]}")
    settings+=(PYTHONPATH="$work/python${PYTHONPATH:+:$PYTHONPATH}")
  else
    # The NCCL wheel has no libnccl.so to link against. Linked dynamically, so that Horovod uses the NCCL that torch loaded.
    if [[ ! ${HOROVOD_NCCL_HOME:-} ]]; then
      mkdir -p "$folder/nccl/lib"
      ln -sfn "$nccl/include" "$folder/nccl/include"
      ln -sf "$nccl/lib/libnccl.so.2" "$folder/nccl/lib/libnccl.so"
      ln -sf "$nccl/lib/libnccl.so.2" "$folder/nccl/lib/libnccl.so.2"
      nccl=$folder/nccl
    fi
    settings+=(
      HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_CUDA_HOME="$cuda" CUDA_HOME="$cuda" PATH="$cuda/bin:$PATH"
      HOROVOD_NCCL_HOME="$nccl" HOROVOD_NCCL_LINK=SHARED HOROVOD_BUILD_CUDA_CC_LIST="$architectures"
    )
    # A toolkit with only the compiler lacks headers that torch's CUDA wheels include.
    [[ -e $cuda/include/cublas_v2.h ]] || settings+=(CPATH="$cuda_headers${CPATH:+:$CPATH}")
  fi
  say "building $version for torch $torch ($variant, Open MPI $mpi, $jobs jobs); about two minutes, log: $log"
  # Without pip's cache, which does not record the torch version of a wheel.
  logged env "${settings[@]}" "${pip[@]}" wheel --no-deps --no-cache-dir --no-build-isolation --no-binary horovod \
    --wheel-dir "$folder/new" "horovod==$version"
  # Atomic: an interrupted build must not leave a partial wheel that later calls would use.
  mv "$folder"/new/*.whl "$folder/"
  rmdir "$folder/new"
  wheels=("$folder"/*.whl)
fi
# --force-reinstall, because a Horovod for another torch has the same version number.
logged "${pip[@]}" install --no-deps --no-index --force-reinstall "${wheels[0]}"

# Check ---------------------------------------------------------------------------------------------------------------

cd "$work"
"$python" - <<'PY'
import sys, horovod, torch
import horovod.torch as hvd

built = {"MPI": hvd.mpi_built(), "Gloo": hvd.gloo_built(), "NCCL": hvd.nccl_built()}
features = ", ".join(f"{name} {'yes' if available else 'no'}" for name, available in built.items())
print(f"horovod {horovod.__version__} for torch {torch.__version__.split('+')[0]}: {features}")
sys.exit(not (built["MPI"] and built["Gloo"]))
PY
cat >check.py <<'PY'
import torch
import horovod.torch as hvd

hvd.init()
assert hvd.size() == 2, f"started 2 processes, but Horovod sees {hvd.size()}"
# Large enough to use the same path as gradients instead of the fast path for small messages.
ramp = torch.arange(1_000_000, dtype=torch.float64)
total = hvd.allreduce(ramp * (hvd.rank() + 1), op=hvd.Sum)
assert torch.equal(total, ramp * 3), "wrong result of an allreduce over 2 processes"
PY
mpirun=(timeout 120 mpirun -np 2 --oversubscribe --bind-to none)
((EUID != 0)) || mpirun+=(--allow-run-as-root)
OMP_NUM_THREADS=1 "${mpirun[@]}" "$python" check.py </dev/null || { say "the check under mpirun failed" >&2; exit 1; }
say "check passed: allreduce over 2 processes under mpirun"
