# The images that pods run; `worldsize image build` builds, tags and pushes them. Targets:
#   torch  for --on pytorchjob and trainjob
#   mpi    also for --on mpijob: with ssh, Open MPI and Horovod
# BASE is any Debian or Ubuntu whose Python, if it has one, is 3.10 to 3.13. Horovod gets NCCL where BASE brings a CUDA
# compiler of the same major version as torch's CUDA, as nvidia/cuda:*-devel-ubuntu24.04 does; otherwise it uses the CPU.
ARG BASE=python:3.11-slim-bookworm

# All that is large and seldom changes; a change of worldsize's code leaves these layers alone.
FROM ${BASE} AS dependencies
USER root
ENV LANG=C.UTF-8
# A compiler and Python's headers are for torch.compile, which needs them when a run starts; libjpeg-dev for the native decoder.
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
# Ubuntu's images have a user of this number already. Group 0 is for clusters that choose the number themselves.
RUN set -eu; \
    if old=$(getent passwd 1000); then userdel "${old%%:*}"; fi; \
    if old=$(getent group 1000); then groupdel "${old%%:*}"; fi; \
    groupadd --gid 1000 worldsize; \
    useradd --uid 1000 --gid 1000 --create-home --home-dir /home/worldsize --shell /bin/bash --password '*' worldsize; \
    chgrp -R 0 /home/worldsize; \
    chmod -R g=u /home/worldsize
COPY pyproject.toml constraints.txt /tmp/build/
# An empty package of this name has the same dependencies as worldsize. setuptools will build worldsize itself; Python 3.11
# comes with one that is too old.
RUN set -eu; \
    python3 -m venv /opt/worldsize; \
    cd /tmp/build; \
    mkdir -p src/worldsize; \
    echo '__version__ = "0"' >src/worldsize/__init__.py; \
    touch LICENSE README.md; \
    pip="/opt/worldsize/bin/pip --no-cache-dir --disable-pip-version-check"; \
    $pip install --constraint constraints.txt "setuptools>=77" ".[k8s,tensorboard,wandb,kaggle]"; \
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
# Declared before RUN, or buildah would take the label from its cache with an old value.
ARG CONTENT=unknown
RUN worldsize --version && python -c "import torch, torchvision, worldsize.job" && worldsize env | grep "native, libjpeg"
LABEL worldsize.content=$CONTENT

FROM dependencies AS horovod
COPY constraints.txt /build/
COPY scripts/build_horovod.sh scripts/horovod-cxx20.cmake /build/scripts/
# With what Horovod itself depends on, whether it is in the environment or not.
RUN set -eu; \
    export XDG_CACHE_HOME=/build/cache; \
    /build/scripts/build_horovod.sh /opt/worldsize/bin/python; \
    pip install --no-cache-dir --disable-pip-version-check --constraint /build/constraints.txt \
        --ignore-installed --prefix=/horovod /build/cache/worldsize/horovod/*/*.whl

FROM dependencies AS mpi-dependencies
# The host keys that openssh-server makes here would be the same in every copy of the image.
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
# BASE's, or empty: mpirun is told to pass it on and complains where there is none.
ENV LD_LIBRARY_PATH=$LD_LIBRARY_PATH

FROM mpi-dependencies AS mpi
COPY --from=package /package /opt/worldsize
USER 1000:1000
WORKDIR /home/worldsize
ARG CONTENT=unknown
RUN worldsize --version && python -c "import torch, torchvision, horovod.torch, worldsize.job" && worldsize-sshd -t
LABEL worldsize.content=$CONTENT
