"""What the doctor runs in processes of their own: each prints one line of JSON, and imports as little as it can."""
