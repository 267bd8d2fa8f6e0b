/* Compiled twice. Preloaded, it replaces two functions of libc10_cuda: there are GPUs, and none has been used.
   As libcuda.so.1, it takes the place of the driver, of which torch's autograd calls one function. */
int fake_gpus = 0;
signed char _ZN3c104cuda12device_countEv(void) { return fake_gpus; }
_Bool _ZN3c104cuda17hasPrimaryContextEa(signed char index) { (void)index; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { (void)device; *flags = 0; *active = 0; return 0; }
