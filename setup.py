"""The native decoder, compiled where a compiler and libjpeg-turbo's headers are; elsewhere worldsize installs without it."""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("native/src")

setup(
    ext_modules=[
        Extension(
            "worldsize.data._native",  # not a Python module: a library that worldsize.data.native loads
            sources=[str(path) for path in sorted(NATIVE.glob("*.c"))],
            depends=[str(path) for path in sorted(NATIVE.glob("*.h"))],
            libraries=["jpeg", "m"],
            # No fused multiply-add: the coefficients must have the same last bit everywhere.
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden"],
            optional=True,
        )
    ]
)
