/* cli/chat_notes.h: conversations of the terminal as notes (paged/store.h): the same that `paged serve` keeps
 * (server/conversation.c), and besides their messages the tokens as the engine was asked with them, so that
 * what was computed is found again, to the token. */
#ifndef PAGED_CLI_CHAT_NOTES_H
#define PAGED_CLI_CHAT_NOTES_H

#include <jansson.h>

#include "cli/cli.h"
#include "paged/conversation.h"
#include "paged/store.h"

typedef struct paged__chat_note {
    const paged_notes *notes; /* borrowed; NULL: nothing is kept */
    json_t *note;             /* owned, or NULL */
    bool has_told;            /* a failure has been told, and is not told again */
} paged__chat_note;

/* A new conversation; it is kept with its first turn. */
int paged__chat_note_begin(paged__cli *cli, paged__chat_note *note, const char *system);

/* Reads the one of this id, or the one that changed last if id is NULL. */
int paged__chat_note_open(paged__cli *cli, paged__chat_note *note, const char *id);

/* What the note says of the system message; NULL: nothing. Borrowed. */
const char *paged__chat_note_system(const paged__chat_note *note);

/* Gives the note's turns to a conversation that has none. Returns an exit code. */
int paged__chat_note_restore(paged__cli *cli, const paged__chat_note *note, paged_conversation *talk);

/* Adds a turn and writes the note. A failure is told, and is none of the conversation's. */
void paged__chat_note_add(paged__cli *cli, paged__chat_note *note, const paged_conversation *talk,
                          const char *user, const char *answer, size_t answer_len);

void paged__chat_note_free(paged__chat_note *note);

/* A line for each conversation on stdout, newest change first. */
int paged__chat_note_list(paged__cli *cli, const paged_notes *notes);

#endif
