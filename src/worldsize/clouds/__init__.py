"""Launchers for clouds: the same run as a task of SkyPilot or dstack, rendered as their YAML. They submit it themselves."""

# Each target is a module with a function `render(spec) -> object`.
TARGETS = ("skypilot", "dstack")
