"""The same bits at every world size: gradients added along one fixed tree. Read `strategy` first."""
