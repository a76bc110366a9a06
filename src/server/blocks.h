/* server/blocks.h: the memory as one sees it: /paged/blocks, /paged/blocks/N, /paged/events, /slots. */
#ifndef PAGED_SERVER_BLOCKS_H
#define PAGED_SERVER_BLOCKS_H

#include "server/server.h"

void paged__blocks_route(paged__conn *conn, const char *block); /* block "": the map */
void paged__events_route(paged__conn *conn);
void paged__slots_route(paged__conn *conn);
void paged__map_free(paged__server *server);

#endif
