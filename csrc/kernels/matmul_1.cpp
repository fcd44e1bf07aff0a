#define ES_LEVEL 1
#include "matmul_table.h"
