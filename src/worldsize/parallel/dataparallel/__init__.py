"""One process drives several GPUs, through torch's nn.DataParallel. Read `strategy` first."""
