"""Messages generated from proto/torchft.proto by ``make proto``; never edited."""
