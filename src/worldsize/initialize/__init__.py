"""``worldsize init``: look at a folder of images, choose how to train on it, and write a recipe. Read `command` first."""
