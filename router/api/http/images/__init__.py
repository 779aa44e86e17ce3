"""Images in HTTP requests: parts of messages become files, from data URLs or listed hosts."""
