"""One process of a run, from request to result. Read `trainer` first: its docstring outlines a step.

`build` makes the parts of a run from a recipe and passes them to the trainer; each other module is one of these parts. How
replicas agree is in `parallel`.
"""
