docker run --gpus all -p 30000:30000 -e MODEL=/m registry.example.com/serving/glm:3
