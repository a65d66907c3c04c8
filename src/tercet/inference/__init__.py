"""Using a trained model: loading, generating, measuring."""
