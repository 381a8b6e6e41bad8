// box is what test pods run: an HTTP and TCP server to aim traffic and probes at, and the clients that aim it.
//
//	box serve [-http :8080] [-tcp :9090] [-not-ready FILE]
//	box get [-timeout D] [-token FILE] URL            prints status and body; exit 1 unless 2xx
//	box load [-rate N] [-for D] URL...                N requests a second, a new connection each; prints a JSON report
//
// A client of our own, because busybox' wget as Debian builds it crashes when given a time-out and has no TLS.
package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

func main() {
	log.SetOutput(os.Stdout)
	commands := map[string]func([]string) error{"serve": serve, "get": get, "load": load}
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: box serve|get|load [flags]")
		os.Exit(2)
	}
	if err := commands[os.Args[1]](os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve(args []string) error {
	flags := flag.NewFlagSet("serve", flag.ExitOnError)
	httpAddress := flags.String("http", ":8080", "address of the HTTP server")
	tcpAddress := flags.String("tcp", ":9090", "address of a TCP server that greets and echoes")
	notReady := flags.String("not-ready", "/tmp/not-ready", "/healthz fails while this file exists")
	flags.Parse(args)

	host, _ := os.Hostname()
	http.HandleFunc("/healthz", func(w http.ResponseWriter, r *http.Request) {
		if _, err := os.Stat(*notReady); err == nil {
			http.Error(w, "not ready", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "host=%s remote=%s\n", host, r.RemoteAddr)
	})
	listener, err := net.Listen("tcp", *tcpAddress)
	if err != nil {
		return err
	}
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				log.Fatal(err)
			}
			go func() {
				defer connection.Close()
				fmt.Fprintf(connection, "host=%s\n", host)
				io.Copy(connection, connection)
			}()
		}
	}()
	log.Printf("serving http on %s and tcp on %s", *httpAddress, *tcpAddress)
	server := &http.Server{Addr: *httpAddress}
	ended := make(chan error, 1)
	go func() { ended <- server.ListenAndServe() }()
	select {
	case err := <-ended:
		return err
	case <-signalled():
		return server.Close()
	}
}

func client(timeout time.Duration) *http.Client {
	return &http.Client{Timeout: timeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true},
	}}
}

func get(args []string) error {
	flags := flag.NewFlagSet("get", flag.ExitOnError)
	timeout := flags.Duration("timeout", 5*time.Second, "for the whole request")
	token := flags.String("token", "", "file of a bearer token")
	flags.Parse(args)
	request, err := http.NewRequest(http.MethodGet, flags.Arg(0), nil)
	if err != nil {
		return err
	}
	if *token != "" {
		value, err := os.ReadFile(*token)
		if err != nil {
			return err
		}
		request.Header.Set("Authorization", "Bearer "+string(value))
	}
	response, err := client(*timeout).Do(request)
	if err != nil {
		return err
	}
	fmt.Println(response.Status)
	if _, err := io.Copy(os.Stdout, response.Body); err != nil {
		return err
	}
	if response.StatusCode/100 != 2 {
		return fmt.Errorf("status %d", response.StatusCode)
	}
	return nil
}

// report of a load run. Failures are few in a run that matters, so each is kept with its time.
type report struct {
	Requests int       `json:"requests"`
	Failed   []failure `json:"failed"`
	// MaxMillis is the slowest answer's time.
	MaxMillis int64 `json:"maxMillis"`
}

type failure struct {
	At    time.Time `json:"at"`
	URL   string    `json:"url"`
	Error string    `json:"error"`
}

func load(args []string) error {
	flags := flag.NewFlagSet("load", flag.ExitOnError)
	rate := flags.Int("rate", 10, "requests a second")
	period := flags.Duration("for", time.Hour, "ends after this, or when signalled")
	timeout := flags.Duration("timeout", 5*time.Second, "for each request")
	flags.Parse(args)
	targets := flags.Args()

	ctx, cancel := context.WithTimeout(context.Background(), *period)
	defer cancel()
	done := signalled()
	ticker := time.NewTicker(time.Second / time.Duration(*rate))
	defer ticker.Stop()
	http := client(*timeout)
	result := report{Failed: []failure{}}
	var lock sync.Mutex
	var running sync.WaitGroup
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
		case <-done:
			cancel()
		case <-ticker.C:
			url := targets[i%len(targets)]
			running.Add(1)
			go func() {
				defer running.Done()
				started := time.Now()
				err := fetch(http, url)
				lock.Lock()
				defer lock.Unlock()
				result.Requests++
				result.MaxMillis = max(result.MaxMillis, time.Since(started).Milliseconds())
				if err != nil {
					result.Failed = append(result.Failed, failure{started.UTC(), url, err.Error()})
				}
			}()
			continue
		}
		if ctx.Err() != nil {
			break
		}
	}
	running.Wait()
	return json.NewEncoder(os.Stdout).Encode(result)
}

func fetch(client *http.Client, url string) error {
	response, err := client.Get(url)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		return err
	}
	if response.StatusCode/100 != 2 {
		return fmt.Errorf("status %d", response.StatusCode)
	}
	return nil
}

func signalled() <-chan os.Signal {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	return signals
}
