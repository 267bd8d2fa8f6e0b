"""What programs and notebooks use; the package `worldsize` offers it all by itself. See docs/python.md.

Names, arguments and errors here are stable: they change only with a new major version. Read `training` first.
"""
