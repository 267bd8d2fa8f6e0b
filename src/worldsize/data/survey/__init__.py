"""Looking at a data set as a whole: `verify` reads every picture, `info` tells what it is, `sheet` shows some of it."""
