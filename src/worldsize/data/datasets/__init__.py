"""Datasets that are files in folders: one module per dataset, and the listings and lists of labels that they share.

A dataset is a module with a function `open_dataset`, and its name in `worldsize.config.recipe.DatasetName`. Read `folder`
first.
"""
