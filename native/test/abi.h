/* Include this first: it switches libjpeg-turbo's headers to the ABI of libjpeg 6, 7 or 8 (-DABI=62, 70 or 80). */
#include <jconfig.h>
#define JCONFIG_INCLUDED
#undef JPEG_LIB_VERSION
#define JPEG_LIB_VERSION ABI
