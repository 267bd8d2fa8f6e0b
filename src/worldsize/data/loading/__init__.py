"""From the plan of a step to a batch on the device, ahead of time. Read `loader` first."""
