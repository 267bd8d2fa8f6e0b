#!/usr/bin/env bash
# Builds libjpeg-turbo and installs it: scripts/build_libjpeg_turbo.sh [PREFIX] (default: /usr).
# For the containers that build wheels: manylinux_2_28 packages 1.5, and the native decoder requires 2.1.
set -euo pipefail

prefix=${1:-/usr}
# Debian 12's version, with which the tests run.
tag=2.1.5.1
commit=8ecba3647edb6dd940463fedf38ca33a8e2a73d1
source=${LIBJPEG_TURBO_GIT:-https://github.com/libjpeg-turbo/libjpeg-turbo}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git clone --quiet --depth 1 --branch "$tag" --config advice.detachedHead=false "$source" "$folder/source"
found=$(git -C "$folder/source" rev-parse HEAD)
[[ $found == "$commit" ]] || { echo "libjpeg-turbo $tag is commit $found, not $commit" >&2; exit 1; }

cmake -S "$folder/source" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$prefix" \
    -DCMAKE_INSTALL_LIBDIR="$prefix/lib64" -DENABLE_STATIC=OFF -DREQUIRE_SIMD=ON -DWITH_TURBOJPEG=OFF
cmake --build "$folder/build" --parallel
cmake --install "$folder/build"
