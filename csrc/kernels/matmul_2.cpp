#define ES_LEVEL 2
#include "matmul_table.h"
