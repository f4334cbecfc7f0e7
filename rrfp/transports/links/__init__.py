"""What transports share: windows, inboxes, links to peers, and memory for received tensors."""
