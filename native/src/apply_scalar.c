#define WS_APPLY ws_apply_scalar
#include "apply.h"
