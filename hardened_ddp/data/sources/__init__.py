"""Where datasets come from: built in, files, the Hub, and opening one by its name."""
