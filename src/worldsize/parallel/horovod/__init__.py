"""The real Horovod, if it is installed. Read `strategy` first; `installed` answers without importing Horovod."""
