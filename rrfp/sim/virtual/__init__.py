"""Virtual time: an event loop whose clock jumps to the next timer."""
