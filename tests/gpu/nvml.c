/* What worldsize asks of NVML, for a machine with two GPUs, "GPU-first" and "GPU-second"; signatures as in nvml.h. */
#include <string.h>

static unsigned long long millijoules = 0;

int nvmlInitWithFlags(unsigned flags) { return 0; }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  if (strcmp(uuid, "GPU-first") && strcmp(uuid, "GPU-second")) return 6; /* NVML_ERROR_NOT_FOUND */
  *device = (void *)(strcmp(uuid, "GPU-first") ? 2L : 1L);
  return 0;
}

int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *energy) {
  *energy = millijoules += 250000;
  return 0;
}

int nvmlDeviceGetUtilizationRates(void *device, unsigned rates[2]) {
  if (device != (void *)2L) return 3; /* NVML_ERROR_NOT_SUPPORTED */
  rates[0] = 75;
  return 0;
}
