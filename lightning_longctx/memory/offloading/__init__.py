"""Host memory, or a file, for what backward needs later."""
