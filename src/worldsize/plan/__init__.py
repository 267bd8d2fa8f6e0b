"""``worldsize plan``: predicts how a recipe scales, before anyone pays for the machines.

`model` computes the time of one step (pure), `traffic` what the recipe's strategy sends (pure), `network` the layers that
send it. `fit` turns assumptions and measurements into parameters with uncertainty, `measured` reads measurements, `job` and
`forecast` put the parts together, `report` prints the result.
"""
