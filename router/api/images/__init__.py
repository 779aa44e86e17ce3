"""Files of images in HTTP requests, from data URLs or listed hosts."""
