"""What a run is: the recipe, its YAML files, and the flags of the command line.

Everything that a user can set is declared here once; code that uses a setting stays in the package of that setting. Imports
no torch. Read `recipe` first.
"""
