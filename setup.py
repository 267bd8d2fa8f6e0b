"""Builds the native decoder. Without a C compiler or libjpeg-turbo's headers, worldsize installs without it."""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("native/src")

setup(
    ext_modules=[
        Extension(
            "worldsize.data.images._native",  # a plain C library, not a Python module; images.native loads it
            sources=[str(path) for path in sorted(NATIVE.glob("*.c"))],
            depends=[str(path) for path in sorted(NATIVE.glob("*.h"))],
            libraries=["jpeg", "m"],
            # No fused multiply-add: coefficients must be bit-identical on every CPU.
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-Wno-psabi", "-fvisibility=hidden"],
            optional=True,
        )
    ]
)
