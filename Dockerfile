# The container images for pods; `worldsize image build` builds, tags and pushes them. Targets:
#   torch  for --on pytorchjob and trainjob
#   mpi    also for --on mpijob: with ssh, Open MPI and Horovod
# BASE is any Debian or Ubuntu container image. If it has Python, that must be 3.10 to 3.14. Horovod uses NCCL if BASE has a
# CUDA compiler of the same major version as torch's CUDA (as in nvidia/cuda:*-devel-ubuntu24.04); otherwise the CPU.
ARG BASE=python:3.11-slim-bookworm

# Large layers that rarely change. Changes to worldsize's code do not rebuild them.
FROM ${BASE} AS dependencies
USER root
ENV LANG=C.UTF-8
# torch.compile needs a compiler and Python's headers at run time; the native decoder needs libjpeg-dev.
RUN set -eu; \
    packages="g++ libjpeg-dev"; \
    [ -e /etc/ssl/certs/ca-certificates.crt ] || packages="$packages ca-certificates"; \
    python3 -c 'import ensurepip' 2>/dev/null || packages="$packages python3-venv"; \
    headers=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null || true); \
    [ -e "$headers/Python.h" ] || packages="$packages python3-dev"; \
    apt-get update; \
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $packages; \
    apt-get clean; \
    rm -rf /var/lib/apt/lists/*
# Ubuntu's container images already have a user with UID 1000. Group 0 is for clusters that assign arbitrary UIDs.
RUN set -eu; \
    if old=$(getent passwd 1000); then userdel "${old%%:*}"; fi; \
    if old=$(getent group 1000); then groupdel "${old%%:*}"; fi; \
    groupadd --gid 1000 worldsize; \
    useradd --uid 1000 --gid 1000 --create-home --home-dir /home/worldsize --shell /bin/bash --password '*' worldsize; \
    chgrp -R 0 /home/worldsize; \
    chmod -R g=u /home/worldsize
COPY pyproject.toml constraints.txt /tmp/build/
# Installs worldsize's dependencies through an empty package with the same metadata. setuptools builds worldsize in a later
# stage; the version that comes with Python 3.11 is too old.
RUN set -eu; \
    python3 -m venv /opt/worldsize; \
    cd /tmp/build; \
    mkdir -p src/worldsize; \
    echo '__version__ = "0"' >src/worldsize/__init__.py; \
    touch LICENSE README.md; \
    pip="/opt/worldsize/bin/pip --no-cache-dir --disable-pip-version-check"; \
    $pip install --constraint constraints.txt "setuptools>=77" ".[k8s,tensorboard,wandb,kaggle,nvml]"; \
    $pip uninstall --yes worldsize; \
    rm -rf /tmp/build
ENV PATH=/opt/worldsize/bin:$PATH HOME=/home/worldsize USER=worldsize PYTHONUNBUFFERED=1
ENTRYPOINT []
CMD ["worldsize", "--help"]
LABEL org.opencontainers.image.title="worldsize" \
      org.opencontainers.image.description="Trains image classifiers at any world size" \
      org.opencontainers.image.licenses="Apache-2.0"

FROM dependencies AS package
COPY pyproject.toml setup.py README.md LICENSE /build/
COPY native/src /build/native/src
COPY src /build/src
RUN pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation --prefix=/package /build

FROM dependencies AS torch
COPY --from=package /package /opt/worldsize
USER 1000:1000
WORKDIR /home/worldsize
# Must come before RUN: otherwise buildah reuses a cached layer with the label's old value.
ARG CONTENT=unknown
RUN worldsize --version && python -c "import torch, torchvision, worldsize.training.build" && worldsize env | grep "native, libjpeg"
LABEL worldsize.content=$CONTENT
ENV WORLDSIZE_CONTENT=$CONTENT

FROM dependencies AS horovod
COPY constraints.txt /build/
COPY scripts/build_horovod.sh scripts/horovod-cxx20.cmake /build/scripts/
# Includes Horovod's dependencies, even those already installed in the environment.
RUN set -eu; \
    export XDG_CACHE_HOME=/build/cache; \
    /build/scripts/build_horovod.sh /opt/worldsize/bin/python; \
    pip install --no-cache-dir --disable-pip-version-check --constraint /build/constraints.txt \
        --ignore-installed --prefix=/horovod /build/cache/worldsize/horovod/*/*.whl

FROM dependencies AS mpi-dependencies
# Removes the host keys that openssh-server generates: all containers would share them.
RUN set -eu; \
    packages="openssh-client openssh-server"; \
    command -v mpirun >/dev/null || packages="$packages openmpi-bin"; \
    apt-get update; \
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $packages; \
    apt-get clean; \
    rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
COPY docker/sshd_config /etc/ssh/sshd_config
COPY docker/ssh_config /etc/ssh/ssh_config.d/worldsize.conf
COPY docker/worldsize-sshd /usr/local/bin/
COPY --from=horovod /horovod /opt/worldsize
# BASE's value, or empty: mpirun passes the variable on and warns if it is not set.
ENV LD_LIBRARY_PATH=$LD_LIBRARY_PATH

FROM mpi-dependencies AS mpi
COPY --from=package /package /opt/worldsize
USER 1000:1000
WORKDIR /home/worldsize
ARG CONTENT=unknown
RUN worldsize --version && python -c "import torch, torchvision, horovod.torch, worldsize.training.build" && worldsize-sshd -t
LABEL worldsize.content=$CONTENT
ENV WORLDSIZE_CONTENT=$CONTENT
