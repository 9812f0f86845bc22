"""What the lake and file sinks share."""
