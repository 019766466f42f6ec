/* The table of one instruction set. */
#include "kernels.h"

#define Q_TEXT_(x) #x
#define Q_TEXT(x) Q_TEXT_(x)

const q_kernels Q_NAME(q_kernels) = {
    .name = Q_TEXT(Q_VARIANT),
};
